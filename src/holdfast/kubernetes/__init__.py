"""Nodes from Kubernetes: a job is an object, an operator makes its pods."""
