"""Checkpoints in tiers: own memory, a buddy's memory, disk, object store.

So far: what the bytes mean (`layout`), checkpoints in a folder (`disk`), where copies go (`placement`). None of it
needs torch; `holdfast.train.durable` writes and reads live tensors.
"""
