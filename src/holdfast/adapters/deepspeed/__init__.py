"""DeepSpeed at level 1."""
