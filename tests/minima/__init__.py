"""The table of tests/lowering_minima.py, by theme."""
