"""What a job is asked to be: fixed at its start, the same for launcher, coordinator and agents."""

from __future__ import annotations

import msgspec

from holdfast.protocol.faults import FaultSpec
from holdfast.protocol.health import HealthSpec
from holdfast.protocol.snapshots import Saving

CACHE_VARIABLE = "HOLDFAST_DATA_CACHE"
"""The environment variable that tells a worker its node's cache of remote data files."""


class Timing(msgspec.Struct, frozen=True):
    """The two knobs, and every time-out that follows from them. All in seconds.

    detection_s: a node that is silent for this long is lost; also the floor of the stall threshold's scale.
    stall_factor: a worker that stands still for `max(1.5 * detection_s, stall_factor * median step)` is stalled.
    """

    detection_s: float = 2.0
    stall_factor: float = 5.0

    @property
    def heartbeat_s(self) -> float:
        """Agents say that they live four times within the detection time."""
        return self.detection_s / 4

    @property
    def stall_floor_s(self) -> float:
        """The shortest standstill that counts as a stall (3 s by default)."""
        return 1.5 * self.detection_s

    def stall_s(self, median_step_s: float | None) -> float:
        """How long a worker may stand still, given the median step."""
        return max(self.stall_floor_s, self.stall_factor * (median_step_s or 0.0))

    @property
    def inspect_s(self) -> float:
        """How long agents may take to save the stacks of their workers and answer."""
        return 0.5 + self.detection_s / 4

    @property
    def hang_s(self) -> float:
        """How long the coordinator's loop may not turn before another coordinator takes its place."""
        return 5 * self.detection_s

    @property
    def adopt_s(self) -> float:
        """How long a restarted coordinator waits for the agents it knows."""
        return 2 * self.detection_s

    @property
    def orphan_s(self) -> float:
        """How long an agent goes on without a coordinator before it stops its workers."""
        return 30 * self.detection_s

    @property
    def start_s(self) -> float:
        """How long a worker may take from its start until it is ready (imports, model build)."""
        return 150 * self.detection_s

    @property
    def form_s(self) -> float:
        """How long the first generation waits for the target once MIN workers are ready."""
        return 15 * self.detection_s

    @property
    def gather_s(self) -> float:
        """How long a newcomer that is ready waits for others that start, so that they join together."""
        return self.detection_s / 2

    @property
    def wait_s(self) -> float:
        """How long a job that is too small waits for a node before it gives up."""
        return 150 * self.detection_s

    @property
    def tier_s(self) -> float:
        """How long nothing at all may come to a durable tier before people are told."""
        return 15 * self.detection_s

    @property
    def stop_s(self) -> float:
        """How long workers may take to finish the step when the job is asked to stop."""
        return 5 * self.detection_s


class SlurmOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `--engine slurm` asks Slurm for.

    time_limit: as Slurm writes it (`30`, `4:00:00`, `2-0`). sbatch_args: further options, as they are. requeue: the job
    is queued again when it is preempted, out of time or out of nodes, and goes on from its state. warn_s: so long before
    its time limit the job stops in order. replace_command: run for a node that is bad, its name appended.
    """

    partition: str = ""
    time_limit: str = ""
    account: str = ""
    gpus_per_node: int = 0
    sbatch_args: tuple[str, ...] = ()
    requeue: bool = False
    warn_s: int = 120
    replace_command: str = ""


class JobSpec(msgspec.Struct, frozen=True):
    """One job. `script` is a path, or a module's name when `module` is set. racks: over which the local engine spreads
    its nodes; 0: none has a rack. data_cache: `DIR[,size=50G]`."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    min_nodes: int = 1
    max_nodes: int = 1
    nproc: int = 1
    spares: int = 0
    wait_for_spare: bool = False
    engine: str = "local"
    preload: tuple[str, ...] = ("torch",)
    faults: tuple[FaultSpec, ...] = ()
    max_restarts: int = 100
    cwd: str = "."
    timing: Timing = Timing()
    saving: Saving = Saving()
    racks: int = 0
    data_cache: str = ""
    health: HealthSpec = HealthSpec()
    slurm: SlurmOptions = SlurmOptions()

    @property
    def target(self) -> int:
        """Workers at full strength."""
        return self.max_nodes * self.nproc

    @property
    def minimum(self) -> int:
        """Fewest workers to train with."""
        return self.target if self.wait_for_spare else self.min_nodes * self.nproc


class Durable(msgspec.Struct, frozen=True):
    """A checkpoint in the durable tier `url`, of `step` committed steps."""

    step: int
    url: str

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.url}/step-{self.step}"


class Resume(msgspec.Struct, frozen=True):
    """What a start found in the durable tiers. checkpoints: newest first, each to be taken if those before it prove to
    be damaged. passed_over: why others are not among them."""

    checkpoints: tuple[Durable, ...] = ()
    passed_over: tuple[str, ...] = ()
