"""Lightning's Trainer at level 2."""
