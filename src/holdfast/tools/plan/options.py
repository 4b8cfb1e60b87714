"""The fields of `holdfast plan run`: flags of the command line and keys of its YAML file alike.

All are text, because 15m, 0.016% and 10M are how people write them; `tools/plan/inputs.py` reads them. `holdfast --help` imports
this module, so it must not need msgspec or numpy. It has no `from __future__ import annotations` because the command line
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
# None in a field means that it was not given as a flag: the YAML file may still have it. So a default is in
# the option, where `--help` and `tools/plan/inputs.py` both read it, and never in the field.


@dataclass(kw_only=True, eq=False, repr=False)
class PlannedWork:
    """The cluster and its work."""

    nodes: Annotated[
        Text,
        Option(names=("--nnodes", "--nodes"), metavar="N", help="Number of nodes that train.", example="256"),
    ] = None
    gpus_per_node: Annotated[
        Text,
        Option(metavar="N", help="GPUs in each node.", example="8", default="8"),
    ] = None
    gpu_hours: Annotated[
        Text,
        Option(metavar="HOURS", help="Amount of work in GPU-hours, for example 10M.", example="10M"),
    ] = None
    tokens: Annotated[
        Text,
        Option(
            metavar="COUNT",
            help="Amount of work in tokens, instead of GPU-hours. Needs --tokens-per-gpu-s.",
            example="15T",
        ),
    ] = None
    tokens_per_gpu_s: Annotated[
        Text,
        Option(metavar="COUNT", help="Tokens per second that one GPU processes.", example="400"),
    ] = None
    step: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Duration of one step.",
            example="10s",
            default="10s",
        ),
    ] = None
    price: Annotated[
        Text,
        Option(
            metavar="PRICE",
            help="Price of a GPU-hour, in any currency.",
            example="2.5 (per GPU-hour)",
            default="0",
        ),
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class RecoveryCosts:
    """How often something fails, and how long recovery takes."""

    rate: Annotated[
        Text,
        Option(
            metavar="RATE",
            help="Failures per node-hour, for example 0.016%.",
            example="0.016% (failures per node-hour), or a mapping of classes: {gpu: 0.01%, network: 0.002%}",
        ),
    ] = None
    mtbf: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Mean time between failures of the whole job, instead of --rate, for example 3h.",
            example="3h (of the whole job)",
        ),
    ] = None
    preset: Annotated[
        Text,
        Option(
            metavar="NAME",
            help=(
                "Source of the default times below: self-managed, managed-cloud, checkpointless, or holdfast with "
                "--report."
            ),
            example="managed-cloud",
            default="managed-cloud",
        ),
    ] = None
    detect: Annotated[
        Text,
        Option(metavar="TIME", help="Time to detect a failure.", example="90s"),
    ] = None
    replace: Annotated[
        Text,
        Option(metavar="TIME", help="Time to get a new node.", example="15m"),
    ] = None
    spare: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time to replace a failed node by a spare.",
            example="1m",
        ),
    ] = None
    resume: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time to restart all workers with the state from storage.",
            example="24m",
        ),
    ] = None
    resume_memory: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time to restart all workers with the state from memory.",
            example="5m",
        ),
    ] = None
    peer: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time until the survivors continue, when a new worker gets the state from a peer.",
            example="2m",
        ),
    ] = None
    spares: Annotated[
        Text,
        Option(
            metavar="N",
            help="Largest number of spares to consider.",
            example="4 (at most)",
            default="4",
        ),
    ] = None
    repair: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time until a used spare is replaced by a new one; by default the same as --replace.",
            example="24h",
        ),
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class Saves:
    """What checkpoints cost."""

    checkpoint_cost: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time for which a checkpoint to storage stalls training.",
            example="30s",
            default="30s",
        ),
    ] = None
    memory_cost: Annotated[
        Text,
        Option(
            metavar="TIME",
            help="Time for which a snapshot to memory stalls training.",
            example="1s",
            default="1s",
        ),
    ] = None
    checkpoint_size: Annotated[
        Text,
        Option(
            metavar="SIZE",
            help="Size of one checkpoint.",
            example="840GB",
            default="840GB",
        ),
    ] = None
    storage_speed: Annotated[
        Text,
        Option(
            metavar="SIZE",
            help="Bytes per second that each node reads from storage.",
            example="5GB (per node and second)",
            default="5GB",
        ),
    ] = None
    network_speed: Annotated[
        Text,
        Option(
            metavar="SIZE",
            help="Bytes per second that each node reads from its peers.",
            example="12.5GB (per node and second)",
            default="12.5GB",
        ),
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class PlanOptions:
    """All options."""

    work: Annotated[PlannedWork, OptionGroup("Cluster and work")] = dataclasses.field(
        default_factory=PlannedWork
    )
    recovery: Annotated[RecoveryCosts, OptionGroup("Failures and recovery")] = dataclasses.field(
        default_factory=RecoveryCosts
    )
    saves: Annotated[Saves, OptionGroup("Checkpoints")] = dataclasses.field(default_factory=Saves)


FIELDS: dict[str, Option] = {field.name: field.option for field in declared(PlanOptions)}
"""Every field by its name."""
