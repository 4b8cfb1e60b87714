"""The planner's simulator: the coordinator's own core decides, on a virtual clock, over a cluster that is only drawn.

It drives the core as the service does. What costs what in closed form is in `plan`, which knows no core.
"""
