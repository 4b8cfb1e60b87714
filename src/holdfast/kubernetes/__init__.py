"""Kubernetes: a job is an object, and an operator makes and looks after its pods. Stands beside the engines: no job needs it."""
