"""Hugging Face's Accelerate."""
