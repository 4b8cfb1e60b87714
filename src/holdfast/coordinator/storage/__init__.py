"""Where the state of training is kept: snapshots in memory and checkpoints in durable tiers. Pure."""
