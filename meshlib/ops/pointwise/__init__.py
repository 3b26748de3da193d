"""Element-wise operations, reductions, cumulative sums and random numbers."""
