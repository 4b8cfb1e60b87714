"""The planner's simulator: the coordinator's own core decides, on a virtual clock, over a cluster that is only drawn.

It lies above `coordinator`, for it drives the core as the service does, and below `cli`. What costs what in closed form is
in `plan`, which stays below and knows no core.
"""
