"""What a machine does: chips, slices, MXU, memory, torus, collectives. Knows bytes, FLOPs and cycles only."""
