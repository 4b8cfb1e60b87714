"""The planner's simulator: the coordinator's own core decides, on a virtual clock, over a simulated cluster.

It calls the core in the same way as the service does. Costs in closed form are in `plan`, which does not use the core.
"""
