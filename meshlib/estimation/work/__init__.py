"""Work of a step as counts: FLOPs, bytes, messages; no time."""
