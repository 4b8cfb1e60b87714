"""Sockets, HTTP and addresses between the processes of a job, and how each proves that it knows the token."""
