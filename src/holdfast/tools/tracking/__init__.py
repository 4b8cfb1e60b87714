"""Experiment trackers as followers of the ledger: nothing that trains calls them, and none can hold a step up."""
