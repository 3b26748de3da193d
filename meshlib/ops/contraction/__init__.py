"""Products: einsum, grouped products, and both in eight bits."""
