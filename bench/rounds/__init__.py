"""What a round over the control channel takes: in a mesh, over a tree, and computed for large jobs."""
