"""Operations that work element by element, reductions, running sums and random numbers."""
