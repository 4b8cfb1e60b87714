"""The specification of a job: fixed at its start, the same for launcher, coordinator and agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.faults import FaultSpec
from holdfast.protocol.job_options import HealthSpec, SlurmOptions, SshOptions, Timing
from holdfast.protocol.place import NodePlace
from holdfast.protocol.snapshots import Saving

CACHE_VARIABLE = "HOLDFAST_DATA_CACHE"
"""The environment variable that tells a worker its node's cache of remote data files."""

DEFAULT_LOG_LIMIT = 1 << 30
"""Bytes of a worker's log."""
LOG_KEPT_SHARE = 0.75
"""Of the limit: what is kept for certain. The rest is given back at once and not with every line."""

REPLAY_VARIABLE = "HOLDFAST_REPLAY_EVERY"
"""The environment variable that tells a worker in how many steps one micro-batch is computed twice."""


FAN_OUT_VARIABLE = "HOLDFAST_TREE_FAN_OUT"
"""The environment variable with which also the members of a small job form a tree, of this fan-out: for tests."""


def tree_fan_out(environment: Mapping[str, str]) -> int | None:
    """What HOLDFAST_TREE_FAN_OUT says; None: nothing.

    Raises:
        UsageError: it is no whole number of 1 or more.
    """
    text = environment.get(FAN_OUT_VARIABLE, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise UsageError(
            f"{FAN_OUT_VARIABLE}={text!r}: must be a whole number of 1 or more, for example 8; or unset it, since the workers "
            "of a large job form a tree by themselves"
        )
    return int(text)


# Written once, as spec.json, and read by every process of the job. It never changes: what a person changes
# later (another size, a drained node) is in the core's state, so a successor finds it there.
class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job."""

    name: str
    script: str
    """A path as it was given, from `cwd`, or a module's name when `module` is set."""
    args: tuple[str, ...] = ()
    """As `processes.text_of` has them."""
    module: bool = False
    """`script` names a module."""
    min_nodes: int = 1
    """Fewest nodes to train on."""
    max_nodes: int = 1
    """Nodes at full strength."""
    nproc: int = 1
    """Workers of a node."""
    spares: int = 0
    """Nodes beside `max_nodes` that wait to replace others."""
    wait_for_spare: bool = False
    """Train only at full strength; otherwise on fewer nodes, `min_nodes` or more, until others come."""
    engine: str = "local"
    preload: tuple[str, ...] = ("torch",)
    """Modules that warm processes import before a worker is needed."""
    faults: tuple[FaultSpec, ...] = ()
    max_restarts: int = 100
    """Workers that may be started again, or at level 0 and 1 starts of all, before the job fails."""
    cwd: str = "."
    """Of the workers."""
    timing: Timing = Timing()
    saving: Saving = Saving()
    racks: int = 0
    """Over so many the local engine spreads its nodes that have no place; 0: it gives none."""
    places: dict[str, NodePlace] = {}
    """Node to where it stands, as the job's topology file says; others are asked of the engine or of the node."""
    data_cache: str = ""
    """`DIR[,size=50G]`; empty: nodes have no cache."""
    health: HealthSpec = HealthSpec()
    slurm: SlurmOptions = SlurmOptions()
    ssh: SshOptions = SshOptions()
    engine_options: dict[str, Any] = {}
    """What an engine of another package was told, by its own names. See `engines.base.Engine.plan`."""
    log_limit: int = DEFAULT_LOG_LIMIT
    """Bytes that the log of one worker may take on its node's disk; the oldest part is given back."""
    log: str = ""
    """`LEVEL[,json]` of the logs of all its processes; empty: each has its default. See `holdfast.logs`."""

    @property
    def target(self) -> int:
        """Workers at full strength."""
        # Of the specification alone. The core has a target of its own, which follows resizes and what the
        # engine allows.
        return self.max_nodes * self.nproc

    @property
    def minimum(self) -> int:
        """Fewest workers to train with."""
        return self.target if self.wait_for_spare else self.min_nodes * self.nproc


class JobDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a node that joins at an address is told of its job."""

    spec: JobSpec
    identity: str
    """Of the job's snapshot memory: nodes adopt what is of this job alone."""
    script_digest: str = ""
    """SHA-256 of the script, in hex; empty where the coordinator has no script to read."""
    job_dir: str = ""
    """The launcher's folder of the job."""


class Durable(msgspec.Struct, frozen=True):
    """A checkpoint in a durable tier."""

    step: int
    """Committed steps."""
    url: str
    """The tier's."""

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.url}/step-{self.step}"


# All candidates and not only the newest: a checkpoint can prove to be damaged when it is read, and then
# nobody lists the tiers again in the middle of a fault.
class Resume(msgspec.Struct, frozen=True):
    """The checkpoints that a start found in the durable tiers."""

    checkpoints: tuple[Durable, ...] = ()
    """Newest first, each to be taken if those before it prove to be damaged."""
    passed_over: tuple[str, ...] = ()
    """Why others are not among them, for people."""
