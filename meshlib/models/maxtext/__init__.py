"""MaxText configurations: read as programs, and written for plans."""
