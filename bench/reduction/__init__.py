"""What protection costs when nothing fails, measured against plain DistributedDataParallel."""
