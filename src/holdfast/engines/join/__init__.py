"""Nodes that somebody else starts: each runs `holdfast agent --join`, and the job waits for them."""
