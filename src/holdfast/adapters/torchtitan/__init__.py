"""torchtitan at level 1."""
