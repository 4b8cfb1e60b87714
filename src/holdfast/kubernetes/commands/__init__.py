"""What commands outside of the cluster need: making a job, following it, and the way to its coordinator."""
