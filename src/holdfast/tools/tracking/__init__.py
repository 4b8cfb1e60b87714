"""Experiment trackers as followers of the ledger: no process that trains calls them, and none can delay a step."""
