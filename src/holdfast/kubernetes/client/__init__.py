"""A client of the API server that knows nothing of jobs: requests, watches, the Lease of a leader, the way into a pod."""
