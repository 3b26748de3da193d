"""Records of a lowered program, its checker, interpreter, analyses and views."""
