"""Products: einsum, and products in eight bits."""
