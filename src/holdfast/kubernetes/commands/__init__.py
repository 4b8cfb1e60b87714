"""For commands outside of the cluster: submits a job, follows it, and reaches its coordinator."""
