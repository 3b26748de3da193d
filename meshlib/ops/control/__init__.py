"""Sources, state, loops, rematerialisation, custom gradients, host callbacks."""
