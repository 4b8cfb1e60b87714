"""What the adapters cost and save: Hugging Face's Trainer and Lightning, with Holdfast and under torchrun alone."""
