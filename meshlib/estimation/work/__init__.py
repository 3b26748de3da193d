"""The work of a step in counts: FLOPs, bytes, messages; no time yet."""
