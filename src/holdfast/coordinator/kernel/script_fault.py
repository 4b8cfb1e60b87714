"""Whether failures are the script's, whatever machine it runs on: pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.coordinator.kernel.membership_state import Failure


class ScriptFault(msgspec.Struct, frozen=True):
    """A fault that the script would show on any machine."""

    reason: str


def script_fault(failures: Sequence[Failure], trained: bool = False, nodes: int = 1) -> ScriptFault | None:
    """Does the newest failure show that the script, not the machine, is at fault?

    Before the first step: the same error in two workers, on two nodes where there are two; once the job has
    trained, such a failure is the machine's. At a step: the same error again after a retry, in a second worker
    (another rank at once, or the fresh one that took over). A death by signal says less about the script, so it
    must repeat three times.

    trained: workers of this script have trained before. nodes: nodes that the job has.
    """
    if not failures:
        return None
    last = failures[-1]
    same = [f for f in failures if (f.step, f.signature) == (last.step, last.signature)]
    workers, attempts = {f.worker for f in same}, {f.generation for f in same}
    needed = 3 if last.signature.startswith("signal") else 2
    if last.step is None:
        if trained or len(workers) < needed or len({f.node for f in same}) < min(2, nodes):
            return None
        return ScriptFault(f"the same error before the first step in {len(workers)} workers")
    if len(workers) >= needed and len(attempts) >= needed:
        return ScriptFault(
            f"the same error at step {last.step} in {len(attempts)} attempts on {len(workers)} workers"
        )
    return None
