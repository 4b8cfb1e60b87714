"""Tensors of a state, for all that save or send them: their index, the tree they hang on, shards, copies to the host."""
