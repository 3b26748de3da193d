"""When everything runs: kernel times, engines, shared links, the schedule and its attribution."""
