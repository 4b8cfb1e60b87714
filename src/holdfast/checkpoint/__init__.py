"""Checkpoints in tiers: own memory, a buddy's memory, disk, object store.

So far: where copies go (`placement`). The plain checkpoint on disk is in `holdfast.train.durable`.
"""
