"""`holdfast ui`: the page of all jobs, at an address that stays."""
