"""What the core gets as the outcome of an order that an agent could not carry out.

The core waits for the outcome of most orders, of some for ever. So an order that fails has an outcome, too: the same that
the agent sends when what was ordered goes wrong.
"""

from __future__ import annotations

import signal

from holdfast.protocol import messages as m
from holdfast.protocol.health import CheckResult, Condition


def refusal(order: m.ToAgent, why: str) -> m.AgentMessage | None:
    """The outcome of an order that failed; None: nothing waits for one, or not for longer than its deadline."""
    match order:
        case m.StartWorker(worker=worker):
            return m.Exited(worker=worker, code=-signal.SIGKILL, tail=(why,), killed=True)
        case m.Replicate(copy):
            return m.SnapshotRejected(copy.key, why)
        case m.StoreShard(tier, key):
            return m.Stored(tier=tier, key=key, shard=None, reason=why)
        case m.Publish(tier, step):
            return m.Published(tier.url, step, why)
        case m.RunChecks(request=request):
            return m.Checked(request, (CheckResult(name="agent", condition=Condition.UNKNOWN, detail=why),))
        case m.Repair(request):
            return m.Repaired(request, why)
        case _:
            return None
