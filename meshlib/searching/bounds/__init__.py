"""Lower bounds on the time and memory of a candidate under any schedule."""
