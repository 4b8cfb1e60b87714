"""States that older versions wrote, under the names of then."""

import msgspec
import pytest
from desk import TIER, running

from holdfast.coordinator.kernel.membership_state import Change
from holdfast.coordinator.kernel.storage_state import Snapshot, Storing
from holdfast.coordinator.service.older_states import state_of
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Saving

CHANGE = Change(
    id=1,
    reason="resized",
    at_step=2,
    before=2,
    after=4,
    left_at_s=1.0,
    formed_at_s=2.0,
    generation=1,
    newcomers=2,
)


@pytest.mark.parametrize("flat", [False, True])
def test_a_state_of_an_older_version_is_read_with_what_has_another_name_now(flat):
    desk = running(4, shape=(2, 1), saving=Saving("1", 0, 0, (TIER,)))
    for worker in desk.members():
        desk.says(worker, m.Joined(1, 0.1, None))
    storing = Storing(tier="archive", step=3, began_s=1.0, shared_blobs={1: "rank-0.blob"})
    desk.state.storage.storing = [storing]
    desk.state.storage.stored = {"archive": storing}
    desk.state.storage.snapshots = [
        Snapshot(step=3, generation=1, world=4, began_s=1.0, complete=True, complete_s=2.0)
    ]
    desk.state.storage.told_complete = (3, None)
    desk.state.health.reported_at_s = {"blast": 7.0}
    desk.state.membership.changes = [CHANGE]
    state = desk.state
    older = msgspec.to_builtins(state)
    renamed_back = [
        (older["membership"], "nodes_joined", "joined"),
        (older["membership"]["generation"], "groups_connected_in", "rows"),
        *((x, "shard_index", "position") for x in older["membership"]["generation"]["members"]),
        *((x, "shard_index", "position") for x in older["membership"]["workers"].values()),
        *((x["ready"], "shard_index", "position") for x in older["membership"]["workers"].values()),
        *((x, "joined_generation", "joined") for x in older["membership"]["workers"].values()),
        *((x, "newcomers", "joined") for x in older["membership"]["changes"]),
        *((x, "shared_blobs", "rows") for x in older["storage"]["storing"]),
        *((x, "shared_blobs", "rows") for x in older["storage"]["stored"].values()),
        *((x, "complete", "whole") for x in older["storage"]["snapshots"]),
        *((x, "complete_s", "whole_s") for x in older["storage"]["snapshots"]),
        (older["storage"], "told_complete", "told_whole"),
        (older["health"], "reported_at_s", "said"),
    ]
    for holder, new, old in renamed_back:
        if new in holder:  # a default is not always written
            holder[old] = holder.pop(new)
    if flat:
        older |= older.pop("membership") | older.pop("storage")
        older["deadlines"] = {}
    assert {w.shard_index for w in state.membership.workers.values()} == {0, 1}
    assert {w.ready.shard_index for w in state.membership.workers.values()} == {0, 1}
    assert {w.joined_generation for w in state.membership.workers.values()} == {1}
    assert state.membership.generation.groups_connected_in == (1, 1)
    assert state.membership.nodes_joined == 4
    read = state_of(msgspec.msgpack.encode(older))
    assert (read.membership, read.storage, read.health) == (state.membership, state.storage, state.health)
