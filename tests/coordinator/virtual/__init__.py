"""The real coordinator service and the real link of agents in virtual time, with a simulated network, disk and engine.

Each simulated process has an event loop of its own, on one clock that jumps from event to event. Workers, faults and most
invariants are those of `simcluster`. One seed is one schedule: `run_seed(seed)`.
"""

from virtual.run import Story, run_seed

__all__ = ["Story", "run_seed"]
