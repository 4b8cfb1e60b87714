"""Who is in the job: nodes, workers, generations, planned changes, failures, and the end. Pure."""
