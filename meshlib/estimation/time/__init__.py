"""The schedule: kernel times, engines, shared links, attribution."""
