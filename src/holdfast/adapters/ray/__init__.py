"""Ray Train at level 1."""
