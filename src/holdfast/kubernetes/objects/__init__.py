"""A HoldfastJob, what is made of it, and what is seen of it: Kubernetes' objects as values, in both directions. Pure."""
