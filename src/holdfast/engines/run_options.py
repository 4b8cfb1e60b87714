"""The options of `holdfast run` that do not depend on the engine. `cli/spec.py` makes a job's specification from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from holdfast import plugins
from holdfast.protocol.job_options import HealthSpec, SnapshotOptions, Timing
from holdfast.protocol.options import Argument, Option, OptionGroup

# `holdfast --help` imports this module, so it must not import anything slow. The modules that turn these values into a
# specification (cli/spec.py) are imported when a job starts.


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """How many nodes and workers the job has."""

    nnodes: Annotated[
        str,
        Option(
            usual=True,
            metavar="N|MIN:MAX",
            default="1; with --hosts, all hosts but the spares",
            help="Number of nodes. With MIN:MAX the job continues on fewer nodes when some are lost.",
        ),
    ] = ""
    """Empty: 1, or with `--hosts` all of them but the spares."""
    nproc_per_node: Annotated[
        str,
        Option(
            usual=True,
            names=("--nproc-per-node", "--nproc_per_node"),
            metavar="N|auto|cpu|gpu",
            help="Workers on each node. auto: one for each GPU, or one for each core if there are no GPUs.",
        ),
    ] = "1"
    spares: Annotated[
        int,
        Option(
            usual=True,
            metavar="N",
            least=0,
            help="Number of additional nodes that are checked and ready to replace a lost one.",
        ),
    ] = 0
    wait_for_spare: Annotated[
        bool, Option(help="When a node is lost, wait for a replacement instead of continuing on fewer nodes.")
    ] = False
    racks: Annotated[
        int,
        Option(
            metavar="N",
            least=0,
            example="2",
            help="Local engine: spread the nodes over N simulated racks. No two copies of a snapshot share a rack.",
        ),
    ] = 0
    topology: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            example="topology.txt",
            help=(
                "File with the location of each host: lines like `node[01-16] zone-a/rack7`, or the output of "
                "`scontrol show topology`."
            ),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """What counts as a failure, and which are injected."""

    timing: Timing = field(default_factory=Timing)
    max_restarts: Annotated[
        int,
        Option(
            usual=True,
            names=("--max-restarts", "--max_restarts"),
            metavar="N",
            least=0,
            help="Give up after this many restarts in a row without a new step between them; 0 never restarts.",
        ),
    ] = 100
    faults: Annotated[
        tuple[str, ...],
        Option(
            usual=True,
            names=("--fault",),
            metavar="KIND[:KEY=VALUE,...]",
            help="Inject a fault, for example kill-node:node=1,step=20. Can be repeated.",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What is saved, how often and where."""

    checkpoints: Annotated[
        tuple[str, ...],
        Option(
            usual=True,
            names=("--checkpoint",),
            metavar="URL[,every=...]",
            help=(
                "Save checkpoints to this folder or s3:// URL. Options: every=auto|STEPS|10m, keep=2, "
                "keep-every=STEPS. Can be repeated to save to several tiers, to slower ones less often."
            ),
        ),
    ] = ()
    snapshots: SnapshotOptions = field(default_factory=SnapshotOptions)
    snapshot_memory: Annotated[
        str,
        Option(
            usual=True,
            metavar="SIZE",
            default="half of the free memory",
            help="Memory for snapshots on each node, for example 8G.",
        ),
    ] = ""
    data_cache: Annotated[
        str,
        Option(
            metavar="DIR[,size=50G]",
            help="Folder on each node in which data files read from URLs are cached.",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What was given on the command line."""

    script: Annotated[str, Argument(help="Training script or, with -m, the name of a module.")]
    args: Annotated[tuple[str, ...], Argument(help="Arguments for the script.")] = ()
    job: Annotated[
        str | None,
        Option(
            usual=True,
            metavar="NAME",
            default="made from the script's name and the time",
            help="Name of the job. If a job of this name was started before, it is resumed.",
        ),
    ] = None
    module: Annotated[
        bool,
        Option(
            usual=True, names=("-m", "--module"), help="SCRIPT is the name of a module, as with `python -m`."
        ),
    ] = False
    preload: Annotated[
        str,
        Option(
            metavar="MODULE,...",
            help="Modules that warm processes import in advance, so that a replacement starts faster.",
        ),
    ] = "torch"
    engine: Annotated[
        str,
        Option(
            usual=True,
            metavar="|".join(plugins.ours(plugins.ENGINES)),
            help=(
                "Where the nodes come from: processes on this machine, hosts reached by ssh, Slurm, Kubernetes, or "
                "(join) machines on which you start `holdfast agent --join`."
            ),
        ),
    ] = "local"
    port: Annotated[
        int,
        Option(least=0, most=65535, metavar="PORT", help="Port of the coordinator; 0 takes any free one."),
    ] = 0
    report: Annotated[
        Path | None,
        Option(usual=True, metavar="FILE", help="When the job ends, write its report to this file as JSON."),
    ] = None
    track: Annotated[
        tuple[str, ...],
        Option(
            usual=True,
            names=("--track",),
            group="Trackers and people",
            metavar="TARGET",
            help=(
                "Send the job's metrics to a tracker until the job ends, as `holdfast track --to TARGET` does: "
                "jsonl:PATH, tensorboard:DIR, mlflow:URI, wandb:PROJECT or otlp:URL. Can be repeated."
            ),
        ),
    ] = ()
    notify: Annotated[
        tuple[str, ...],
        Option(
            usual=True,
            names=("--notify",),
            group="Trackers and people",
            metavar="TARGET",
            help=(
                "Send people a message when the job needs them, as `holdfast notify --to TARGET` does: slack:FILE, "
                "webhook:FILE or mail:ADDRESS. Can be repeated."
            ),
        ),
    ] = ()
    no_ui: Annotated[bool, Option(usual=True, help="Print plain lines instead of the live view.")] = False
    log_level: Annotated[
        str,
        Option(
            metavar="LEVEL[,json]",
            help=(
                "Level of the logs in the job's folder: debug, info, warning or error. With ,json appended, each "
                "line is a JSON object. By default HOLDFAST_LOG applies."
            ),
        ),
    ] = ""
    log_limit: Annotated[
        str,
        Option(
            metavar="SIZE",
            example="1G",
            help=(
                "Disk space for the log of each worker, 16M or more. When it is used up, the oldest output is deleted."
            ),
        ),
    ] = "1G"
    nodes: Annotated[NodeOptions, OptionGroup("Nodes")] = NodeOptions()
    failures: Annotated[FailureOptions, OptionGroup("Failures")] = FailureOptions()
    save: Annotated[SaveOptions, OptionGroup("Snapshots, checkpoints and data")] = SaveOptions()
    health: Annotated[HealthSpec, OptionGroup("Health of the nodes")] = field(default_factory=HealthSpec)
    preview: Annotated[
        bool,
        Option(
            usual=True,
            names=("--dry-run",),
            help=(
                "Print what would be started, and exit: the job as YAML, the batch script for Slurm, or the objects "
                "for Kubernetes."
            ),
        ),
    ] = False
    file: Annotated[
        Path | None,
        Option(
            usual=True,
            names=("-f", "--file"),
            metavar="FILE",
            help=(
                "YAML file with options by their names, for example `nnodes: 4`; also script and args. Options on "
                "the command line override it."
            ),
        ),
    ] = None
    engines: Mapping[str, Any] = field(default_factory=dict)
    """The engines' options by the engines' names, each an instance of `Engine.options`. Two engines may share one."""
