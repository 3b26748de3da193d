"""Operations that move elements: reshapes, slices, gathers, sorting, rearrange."""
