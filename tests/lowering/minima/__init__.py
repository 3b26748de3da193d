"""The table of tests/lowering/minima_tables.py, by theme."""
