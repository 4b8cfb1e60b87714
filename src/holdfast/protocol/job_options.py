"""Parts of a job's specification that the command line gives as they are. On Kubernetes the job's object has them, too."""

from dataclasses import dataclass
from typing import Annotated

from holdfast.protocol.options import Option
from holdfast.protocol.units import SHARE, parse_share

# The text under a field is what `kubectl explain` says of it, where an object has the field, too.
#
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
    """A node that is silent for this long is lost."""
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
    """Of a median step; a worker that stands still longer is stalled."""

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


CADENCE = "^(auto|0|[1-9][0-9]*|[0-9]+([.][0-9]+)?[smh])$"
"""As `checkpoint.policy.parse_cadence` reads it."""


@dataclass(frozen=True)
class SnapshotOptions:
    """What is kept in the memory of the nodes."""

    every: Annotated[
        str,
        Option(
            usual=True,
            names=("--snapshot-every",),
            pattern=CADENCE,
            metavar="auto|STEPS|TIME",
            help="How often to copy the state to the memory of the nodes: auto, 100 (steps), 30s, or 0 for never.",
        ),
    ] = "auto"
    """Steps (100), time (30s) or auto."""
    copies: Annotated[
        int,
        Option(
            metavar="N", least=0, help="Number of other nodes that keep a copy of each snapshot in memory."
        ),
    ] = 1
    """Other nodes that keep each."""


@dataclass(frozen=True, kw_only=True)
class HealthSpec:
    """How the nodes' health is watched, and what may be done about it."""

    watch: Annotated[
        bool,
        Option(names=("--health/--no-health",), help="Watch the hardware and the kernel log of the nodes."),
    ] = True
    rules: Annotated[
        tuple[str, ...],
        Option(
            names=("--health-rules",),
            metavar="FILE",
            help="File of health rules (TOML) that add to or change the built-in ones. Can be repeated.",
        ),
    ] = ()
    dry_run: Annotated[
        tuple[str, ...],
        Option(
            names=("--health-dry-run",),
            metavar="RULE",
            help="Record what this rule finds but never act on it; * means all rules. Can be repeated.",
        ),
    ] = ()
    """Rules on trial; *: all."""
    history: Annotated[
        str,
        Option(
            names=("--node-history",),
            metavar="FILE|URL",
            default="$HOLDFAST_HOME/health.sqlite",
            help="Where the history of machines is kept over all jobs: a SQLite file or a PostgreSQL URL.",
        ),
    ] = ""
    """Empty: `$HOLDFAST_HOME/health.sqlite`."""
    blast_radius: Annotated[
        str,
        Option(
            metavar="SHARE",
            pattern=SHARE,
            help="Take action on at most this share of the nodes within ten minutes.",
        ),
    ] = "25%"
    """Of the nodes, acted on within ten minutes."""
    deep_checks: Annotated[
        bool,
        Option(help="Run the deep checks on a node before it joins the job."),
    ] = False
    hooks: Annotated[
        str,
        Option(
            metavar="DIR",
            help="Folder of scripts that run on each node, named on-create, before-join, on-drain and after-job.",
        ),
    ] = ""
    replace_slow: Annotated[
        float,
        Option(
            metavar="FACTOR",
            default="0: only report slow nodes",
            help="Replace a node that computes this many times slower than its peers (for example 1.3), once it has "
            "cost more time than a replacement would.",
        ),
    ] = 0.0
    replay: Annotated[
        str,
        Option(
            metavar="1/N",
            default="no step is computed twice",
            help="Compute one micro-batch of one step in N again on another node and compare the gradients' bits, for "
            'example 1/1000. For scripts with reduction="exact".',
        ),
    ] = ""
    """As `check_replay` in `cli/spec.py` takes it."""
    replace_suspect: Annotated[
        bool,
        Option(
            names=("--replace-suspect/--ask-suspect",),
            help=(
                "Replace a node whose local loss or gradient is repeatedly wrong while those of all other ranks are "
                "not."
            ),
        ),
    ] = False
    blast_window_s: float = 600.0
    """Of `blast_radius`. No option gives it."""
    reboot_s: float = 2700.0
    """Seconds after which a machine that was ordered to reboot is given up; bare metal takes some 30
    minutes. No option gives it."""

    @property
    def blast_share(self) -> float:
        """`blast_radius` as a number."""
        return parse_share("--blast-radius", self.blast_radius)

    @property
    def replay_every(self) -> int:
        """A micro-batch of one step of so many is computed twice; 0: none."""
        return int(self.replay.partition("/")[2] or 0)


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
