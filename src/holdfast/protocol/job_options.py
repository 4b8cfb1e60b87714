"""Parts of a job's specification that the command line gives as they are."""

from dataclasses import dataclass
from typing import Annotated

from holdfast.protocol.options import Option

# Dataclasses, not msgspec's structs as the rest of the specification: `holdfast --help` reads them and must not import
# msgspec, which alone would cost it a tenth of a start. msgspec reads and writes both kinds alike.


@dataclass(frozen=True)
class Timing:
    """The two timing options, and every time-out that follows from them. All in seconds."""

    detection_s: Annotated[
        float,
        Option(
            names=("--detection",),
            metavar="SECONDS",
            least=0.2,
            most=600,
            unit="seconds",
            example="2",
            help="A node from which nothing is heard for this many seconds counts as lost.",
        ),
    ] = 2.0
    """A node that is silent for this long is lost. It is also the scale of the other time-outs."""
    stall_factor: Annotated[
        float,
        Option(
            metavar="FACTOR",
            least=2,
            most=1000,
            unit="median steps",
            example="5",
            help=(
                "A worker counts as stalled when it makes no progress for this many times the median step time (at "
                "least 3 s)."
            ),
        ),
    ] = 5.0
    """A worker that stands still for `max(1.5 * detection_s, stall_factor * median step)` is stalled."""

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
        # The floor is for jobs of short steps: five median steps of 10 ms are less than a garbage collection
        # or a page fault takes.
        return max(self.stall_floor_s, self.stall_factor * (median_step_s or 0.0))

    @property
    def inspect_s(self) -> float:
        """How long agents may take to save the stacks of their workers and answer."""
        return 0.5 + self.detection_s / 4

    @property
    def where_s(self) -> float:
        """How long a worker at level 0 or 1 may take, on top of that, to say where it is in its collectives."""
        # Torch writes down up to 2,000 collectives as text for it: 0.4 s on a processor that others use too.
        return 1.0

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


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What `--engine slurm` asks Slurm for."""

    partition: Annotated[str, Option(usual=True, help="Partition to queue the job in.", metavar="NAME")] = ""
    """Empty: the cluster's default partition."""
    time_limit: Annotated[
        str,
        Option(
            usual=True,
            names=("--time",),
            metavar="LIMIT",
            help="Time limit in Slurm's notation: 30 (minutes), 4:00:00 or 2-0 (days).",
        ),
    ] = ""
    """As Slurm writes it (`30`, `4:00:00`, `2-0`). Empty: the partition's limit."""
    account: Annotated[str, Option(help="Account to charge.", metavar="NAME")] = ""
    """Empty: the user's default account."""
    gpus_per_node: Annotated[
        int, Option(help="Number of GPUs to request on each node.", metavar="N", least=0, example="8")
    ] = 0
    """0: none are asked for."""
    sbatch_args: Annotated[
        tuple[str, ...],
        Option(
            names=("--sbatch-arg",),
            metavar="OPTION",
            help="Pass this option on to sbatch. Can be repeated.",
        ),
    ] = ()
    """Further options of sbatch, as they are."""
    requeue: Annotated[
        bool,
        Option(help="When the job is preempted or runs out of time or nodes, queue it again and resume it."),
    ] = False
    """The job is queued again when it is preempted, out of time or out of nodes, and resumes from its state."""
    warn_s: Annotated[
        int,
        Option(
            names=("--stop-before",),
            metavar="SECONDS",
            least=10,
            unit="seconds",
            example="120",
            help="How many seconds before the time limit to save the state and stop.",
        ),
    ] = 120
    """The job saves its state and stops this many seconds before its time limit."""
    replace_command: Annotated[
        str,
        Option(
            help="Command to run when a node is faulty. The node's name is appended to it.", metavar="COMMAND"
        ),
    ] = ""
    """Runs for a faulty node, whose name is appended. Empty: nothing runs."""


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """Where `--engine ssh` finds its nodes."""

    hosts: Annotated[
        tuple[str, ...],
        Option(
            usual=True,
            metavar="HOST,...",
            help="Hosts as ssh accepts them: names, user@name, or aliases in ~/.ssh/config. Can be repeated.",
        ),
    ] = ()
    """What ssh is given, one for each host."""
    config: Annotated[
        str,
        Option(names=("--ssh-config",), metavar="FILE", default="~/.ssh/config", help="ssh's configuration."),
    ] = ""
    """Empty: the user's own."""
    python: Annotated[
        str,
        Option(
            names=("--remote-python",),
            metavar="PATH",
            default="the path of this Python",
            help="Path of Python on the hosts, in an environment with the same packages as this one.",
        ),
    ] = ""
    """Empty: the path of this process's."""
    address: Annotated[
        str,
        Option(
            metavar="IPV4",
            default="the address that the hosts see",
            help="Address of this machine that the hosts can reach. The coordinator listens there.",
        ),
    ] = ""
    """Empty: what most hosts see."""
    env: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME",
            help="Pass this environment variable on to the hosts, for example NCCL_SOCKET_IFNAME. Can be repeated.",
        ),
    ] = ()
    """Names only. The values go to the hosts beside the token, and are in no file."""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names: the hosts without their users."""
        return tuple(host.rpartition("@")[2] for host in self.hosts)
