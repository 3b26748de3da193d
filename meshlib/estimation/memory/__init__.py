"""Memory of one device over time, whether it fits, and what would lower its peak."""
