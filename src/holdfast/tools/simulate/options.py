"""The fields of `holdfast plan simulate`: flags of the command line and keys of its YAML file alike.

All are text, because 15m, 0.016% and 2% are how people write them; `tools/simulate/scenario.py` reads them. `holdfast --help`
imports this module, so it must not need msgspec. It has no `from __future__ import annotations` because the command line
evaluates its annotations (see `protocol/options.py`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from holdfast.protocol.options import Option, OptionGroup, declared

Text = str | None
# The dataclasses below are only read field by field. Each method that `dataclass` would make for them delays every start
# of the command line, so they have none but `__init__`.
#
# None in a field means that it was not given as a flag: the YAML file may still have it. The defaults in the options are
# what a `Scenario` has; a test compares them.


@dataclass(kw_only=True, eq=False, repr=False)
class SimulatedWork:
    """The cluster and its work."""

    nodes: Annotated[
        Text, Option(names=("--nnodes", "--nodes"), metavar="N", help="Nodes that train.", example="2048")
    ] = None
    days: Annotated[
        Text,
        Option(
            metavar="DAYS", help="The work: days of training at full size without failures.", example="54"
        ),
    ] = None
    gpus_per_node: Annotated[
        Text, Option(metavar="N", help="GPUs of each node.", example="8", default="8")
    ] = None
    step: Annotated[
        Text, Option(metavar="TIME", help="The time of one step.", example="10s", default="10s")
    ] = None
    micro_batches: Annotated[
        Text,
        Option(
            metavar="N",
            help="Micro-batches of a step; 0: they divide evenly over any number of nodes.",
            example="4096",
            default="0",
        ),
    ] = None
    spares: Annotated[
        Text, Option(metavar="N", help="Nodes that wait to replace a failed one.", example="4", default="0")
    ] = None
    min_nodes: Annotated[
        Text,
        Option(
            metavar="N", help="The fewest nodes to continue with; by default all of them.", example="2000"
        ),
    ] = None
    max_restarts: Annotated[
        Text,
        Option(
            metavar="N",
            help="Restarts in a row, without a new step between them, after which the job gives up.",
            example="1000",
            default="100",
        ),
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class Failures:
    """Failures, their rates, and the replacement of nodes."""

    rate: Annotated[
        Text, Option(metavar="RATE", help="Failures per node-hour, for example 0.0161%.", example="0.0161%")
    ] = None
    lemons: Annotated[
        Text,
        Option(
            metavar="SHARE", help="The share of machines that fail more often.", example="2%", default="0%"
        ),
    ] = None
    lemon_factor: Annotated[
        Text, Option(metavar="FACTOR", help="How many times as often those fail.", example="10", default="10")
    ] = None
    cloud: Annotated[
        Text,
        Option(
            metavar="true|false",
            help="Whether a failed machine is exchanged for a new one. If not, it is repaired.",
            example="true",
            default="true",
        ),
    ] = None
    replace: Annotated[
        Text, Option(metavar="TIME", help="Until a new node is there.", example="15m", default="15m")
    ] = None
    repair: Annotated[
        Text, Option(metavar="TIME", help="Until a failed machine is repaired.", example="24h", default="24h")
    ] = None
    scarce: Annotated[
        Text,
        Option(
            metavar="SHARE",
            help="The share of requests for a new node that find none.",
            example="10%",
            default="0%",
        ),
    ] = None
    capacity: Annotated[
        Text,
        Option(metavar="TIME", help="How long there is none then, on average.", example="1h", default="1h"),
    ] = None
    resubmit: Annotated[
        Text,
        Option(
            metavar="TIME", help="Until somebody restarts a job that gave up.", example="10m", default="10m"
        ),
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class RecoveryTimes:
    """Durations of recovery, and the intervals between saves."""

    detection: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="The time after which a silent node is lost; other time-outs follow from it.",
            example="2s",
            default="2s",
        ),
    ] = None
    start: Annotated[
        Text, Option(metavar="TIME", help="Until a new process is ready.", example="1m", default="1m")
    ] = None
    join: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Until a new generation trains, if nobody needs the state.",
            example="1s",
            default="1s",
        ),
    ] = None
    peer: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="The same, if somebody gets the state from a peer.",
            example="10s",
            default="10s",
        ),
    ] = None
    resume_memory: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="The same, if all get the state from snapshots in memory.",
            example="30s",
            default="30s",
        ),
    ] = None
    resume: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="The same, if all get the state from a checkpoint.",
            example="5m",
            default="5m",
        ),
    ] = None
    memory_every: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="The time between two snapshots; 0: none are made.",
            example="1m",
            default="1m",
        ),
    ] = None
    durable_every: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="The time between two checkpoints; 0: none are made.",
            example="30m",
            default="30m",
        ),
    ] = None
    store: Annotated[
        Text,
        Option(
            metavar="TIME", help="How long a checkpoint takes to reach storage.", example="1m", default="1m"
        ),
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class ScenarioOptions:
    """All options."""

    work: Annotated[SimulatedWork, OptionGroup("Cluster and work")] = dataclasses.field(
        default_factory=SimulatedWork
    )
    failures: Annotated[Failures, OptionGroup("Failures")] = dataclasses.field(default_factory=Failures)
    recovery: Annotated[RecoveryTimes, OptionGroup("Recovery and checkpoints")] = dataclasses.field(
        default_factory=RecoveryTimes
    )


FAILURES = "failures"
"""The only field that exists in a YAML file but not as a flag: a list of classes of failures, in place of `rate`."""

EXAMPLES = {field.name: field.option.example for field in declared(ScenarioOptions)} | {
    FAILURES: "[{name: gpu, scope: node, rate: 0.01%}, {name: switch, scope: rack, size: 32, rate: 0.0001%}]"
}
"""Every field with an example."""
