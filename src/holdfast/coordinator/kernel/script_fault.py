"""Whether failures are the script's, whatever machine it runs on: pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.coordinator.kernel.membership_state import Failure

SIGNAL, EXIT = "signal", "exit code"
"""How the signature of a process that just ended begins; others are of exceptions."""


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
    # Only the newest failure is asked about. Older ones were judged when they were the newest, and asking
    # about them again would stop a job for something that it has survived.
    last = failures[-1]
    # Step and signature, not the message alone: the same exception at another step is another event, because
    # the data differs. A script's own fault comes back at the same step.
    same = [f for f in failures if (f.step, f.signature) == (last.step, last.signature)]
    workers, attempts = {f.worker for f in same}, {f.generation for f in same}
    # A Python exception names a line of the script. A signal may be a flipped bit, a bad driver or the OOM
    # killer, so it takes one more witness before a person's job is stopped for it.
    needed = 3 if last.signature.startswith(SIGNAL) else 2
    # Two nodes, where there are two: a wrong path or a missing package on one node looks the same as a broken
    # script, except that the other node starts.
    if last.step is None:
        if trained or len(workers) < needed or len({f.node for f in same}) < min(2, nodes):
            return None
        return ScriptFault(f"the same error before the first step in {len(workers)} workers")
    # Both counts, because several workers of one attempt prove nothing: one NaN is reduced into every rank,
    # and all of them raise at once.
    if len(workers) >= needed and len(attempts) >= needed:
        first, *others = dict.fromkeys(f.node for f in same)
        # An exception names a line of the script, which says more than where it was raised.
        if others and last.signature.startswith((SIGNAL, EXIT)):
            named = f"{', '.join([first, *others[:-1]])} and {others[-1]}"
            return ScriptFault(
                f"step {last.step} ended a worker in {len(attempts)} attempts, on {named}, which have only the "
                "script and the samples of that step in common"
            )
        return ScriptFault(
            f"the same error at step {last.step} in {len(attempts)} attempts on {len(workers)} workers"
        )
    return None
