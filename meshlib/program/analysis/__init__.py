"""Analyses of a program's records: buffers, memory, stored values, work."""
