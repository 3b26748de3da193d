"""Memory of one device over time, whether the program fits, and remedies that lower its peak."""
