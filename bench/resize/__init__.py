"""What planned changes of the membership cost."""
