"""What a job's wall time is spent on. Reports and the coordinator's state on disk name these classes."""

from __future__ import annotations

from enum import StrEnum


class TimeClass(StrEnum):
    """Every second since the job's start is in exactly one of these."""

    START = "start"
    """Until the job's first step is made: nodes come, processes start, the script imports and builds."""
    LAUNCH = "launch"
    """From the first start of an unmodified script to its first step. A report counts it as START once there is a step."""
    COMPUTED = "computed"
    """Steps, with the work of the script's own between them. A report divides it into the next two where it can."""
    PRODUCTIVE = "productive"
    """Steps that stayed."""
    RECOMPUTED = "recomputed"
    """Steps that a restart from an older state rolled back, and that had to be done again."""
    INTERRUPTED = "interrupted"
    """Work on a step that a fault ended: from the last step to the fault."""
    DETECT = "detect"
    """From the fault until it was noticed. Zero where the time of the fault is not known."""
    DECIDE = "decide"
    """Until all workers of the disturbed generation have left it."""
    REPLACE = "replace"
    """Until there are workers enough for the next one."""
    JOIN = "join"
    """Until the members of the next generation are connected."""
    RESTORE = "restore"
    """Until they have the state, as long as the slowest took."""
    FIRST_STEP = "first_step"
    """Until its first step is committed."""
    RESTART = "restart"
    """At levels 0 and 1, from a start of all workers again to its first step."""
    PLANNED = "planned"
    """From the last step before a planned change of the membership to the first one after it."""
    SAVING = "saving"
    """After the last step: the script's own end, and the newest state on its way to the durable tiers."""
    UNEXPLAINED = "unexplained"
    """Nobody can tell: the script says nothing of its steps, or an older version of the coordinator counted nothing."""
