"""A cluster that exists only in a seed: agents, workers, network and engine under a virtual clock.

The real `Core` decides; everything around it is simulated with the rules of the real agents and workers, and
with every delay, loss and reordering that they may meet. One seed is one schedule: `run(plan_for(seed))`.
"""

from simcluster.cluster import Cluster
from simcluster.plan import Plan, plan_for
from simcluster.run import Summary, run_seed

__all__ = ["Cluster", "Plan", "Summary", "plan_for", "run_seed"]
