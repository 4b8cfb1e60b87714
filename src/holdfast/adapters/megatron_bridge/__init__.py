"""Megatron-Bridge at level 1."""
