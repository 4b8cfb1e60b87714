"""What stands beside a job: planning, simulation, checks of nodes, corpora, conversion, trackers, monitoring.

No job that trains imports anything of it: the linter holds that (pyproject.toml). A process beside the job may be started from it.
"""
