"""What the operator decides, from what it knows of a job. Pure."""
