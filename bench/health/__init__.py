"""What watching costs."""
