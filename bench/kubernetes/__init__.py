"""What the operator of Kubernetes costs: memory, processor time and requests, with many nodes."""
