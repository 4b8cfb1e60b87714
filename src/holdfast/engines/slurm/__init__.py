"""Nodes from Slurm: one job's allocation, follow-up allocations, and what Slurm is told of bad nodes."""
