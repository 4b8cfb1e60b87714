"""A simulated cluster for the operator's decisions: an API server with its ways to fail, machines, and a coordinator."""
