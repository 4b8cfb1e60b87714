"""The operator's decisions about a job, from what it has observed. Pure."""
