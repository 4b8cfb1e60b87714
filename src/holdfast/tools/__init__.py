"""Tools beside a job: planning, simulation, checks of nodes, corpora, conversion, trackers, monitoring.

No job that trains imports anything from here, which the linter enforces (pyproject.toml). A job may start a tool as a
separate process.
"""
