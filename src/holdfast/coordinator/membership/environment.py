"""The environment variables of a worker."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.membership_state import Node
from holdfast.protocol.job import CACHE_VARIABLE, REPLAY_VARIABLE
from holdfast.protocol.snapshots import TIERS_VARIABLE


def environment(context: Context, node: Node, slot: int, rank: int, world: int) -> dict[str, str]:
    """torchrun's variables for one worker. At level 2 they are only a first guess: `run.rank` is the rank."""
    spec = context.spec
    there = context.alive_nodes()
    master = there[0]
    ports = master.ports or (29500,)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(slot),
        "GROUP_RANK": str(there.index(node)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_WORLD_SIZE": str(max(1, world // spec.nproc)),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(ports[context.state.membership.master_uses % len(ports)]),
        "TORCHELASTIC_RESTART_COUNT": str(context.state.membership.restarts_used),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.name,
        "HOLDFAST_JOB": spec.name,
        "HOLDFAST_NODE": node.name,
        "HOLDFAST_TARGET": str(spec.target),
        "HOLDFAST_MINIMUM": str(spec.minimum),
        "HOLDFAST_GENERATION": str(context.state.membership.number),
        **({REPLAY_VARIABLE: str(spec.replay_every)} if spec.replay_every else {}),
        "HOLDFAST_SNAPSHOT_EVERY": spec.saving.memory,
        **({CACHE_VARIABLE: spec.data_cache} if spec.data_cache else {}),
        TIERS_VARIABLE: msgspec.json.encode(spec.saving.tiers).decode(),
    }
