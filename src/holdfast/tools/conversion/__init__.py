"""`holdfast checkpoint export` and `import`: checkpoints as files that other programs read."""
