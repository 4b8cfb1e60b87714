"""What lives in the worker: run, step, membership, reduction, commit, state transfer."""
