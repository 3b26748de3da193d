"""Tensors on disk: the safetensors format, and checkpoints of a simulation's state."""
