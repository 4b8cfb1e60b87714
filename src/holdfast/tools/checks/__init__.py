"""Deep checks of a node, and checks between nodes. `health.checks` runs them in a child process and judges the results."""
