"""What each part of a step asks of the machine, in counts: FLOPs, bytes, messages. No time yet."""
