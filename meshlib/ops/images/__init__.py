"""Convolutions, pooling, windows and resizing."""
