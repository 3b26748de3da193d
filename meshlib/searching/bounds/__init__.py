"""Lower bounds on what any schedule of a candidate takes."""
