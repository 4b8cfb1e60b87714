"""The benchmarks: every number in the README is printed by one of these."""
