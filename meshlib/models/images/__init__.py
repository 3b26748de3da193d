"""Image models, each from one frozen config, composed of layers alone."""
