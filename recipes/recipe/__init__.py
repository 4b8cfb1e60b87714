"""What the recipes share: reading a file, building and sharding a model, its weights in and out, samples."""
