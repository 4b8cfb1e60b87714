"""Engines, which provide the nodes of a job."""
