"""What a program's records imply: buffers, memory, stored values, work."""
