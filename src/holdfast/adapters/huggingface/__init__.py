"""Hugging Face's Trainer at level 2."""
