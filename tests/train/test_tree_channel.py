"""The control channel over a tree: what a step hears over it, and what it does not hear when a member of it is gone."""

import contextlib
import math
import random
import threading
from functools import partial

import pytest
import torch
from cluster import TOKEN, Cluster

from holdfast.errors import CollectiveFault, UsageError
from holdfast.protocol.messages import Generation, Member
from holdfast.protocol.wire.frames import pack
from holdfast.train.generation_group import channel_of
from holdfast.train.member_tree import NOT_IN_SUM, OTHER_SUM, Round, Word
from holdfast.train.step_sum import addends
from holdfast.train.tree_channel import TreeChannel

NOT_ASKED = (1.0, 0.0, 0.0)


def labels(member):
    return (f"shard-{member.shard_index}",)


@contextlib.contextmanager
def channels(size, fan_out, nodes=None):
    """The channels of a generation, connected, and how to call something with each of them at once."""
    cluster = Cluster(size)
    generation = cluster.generation(1)
    if nodes is not None:
        members = [
            Member(
                rank=m.rank,
                worker=m.worker,
                node=nodes[m.rank],
                slot=0,
                host=m.host,
                vote_port=m.vote_port,
                shard_index=m.rank % 2,
            )
            for m in generation.members
        ]
        generation = Generation(number=1, members=tuple(members))
    made = [channel_of(generation, rank, fan_out) for rank in range(size)]
    try:
        cluster.each(lambda c: c.connect(cluster.listeners[c.rank], TOKEN), made)
        yield made, partial(cluster.each)
    finally:
        for channel in made:
            channel.abort()
            channel.close()
        cluster.close()


def vote(channel, step=5, message=NOT_ASKED):
    channel.send_vote(step, message)
    return [tuple(heard) for heard in channel.receive_vote(step, [message])]


SHAPES = [(1, None), (2, None), (3, [f"n{rank // 2}" for rank in range(9)]), (8, ["n0"] * 9)]


@pytest.mark.parametrize(("fan_out", "nodes"), SHAPES, ids=["chain", "binary", "nodes", "star"])
def test_a_tree_says_what_a_mesh_says(fan_out, nodes):
    rng = random.Random(fan_out)
    size = 9
    weights = [
        [
            (rng.uniform(0, 9), rng.uniform(-1, 1) * 10 ** rng.randint(-9, 9), 4.0)
            for _ in range(rng.randint(1, 3))
        ]
        for _ in range(size)
    ]
    counts = [len(mine) for mine in weights]
    squares = [rng.random() for _ in range(size)]
    numbers = [
        {"x": [rng.uniform(-1, 1) for _ in range(5)], "t": torch.rand(3, dtype=torch.float64), "n": rank}
        for rank in range(size)
    ]

    def step(channel):
        rank = channel.rank
        summed = channel.sum(5, addends(numbers[rank]), rank != 4)
        channel.send_weights(5, *weights[rank])
        heard = channel.receive_weights(5, weights[rank], counts)
        norm = channel.exchange(5, (squares[rank], 0.0, 0.0), rank < 3)
        ballots = vote(channel, message=(1.0, float(rank == 7), 0.0))
        return (
            summed["x"],
            summed["t"].tolist(),
            summed["n"],
            math.fsum(w for w, _, _ in heard),
            math.fsum(x for _, x, _ in heard),
            {layout for _, _, layout in heard},
            sum(norm[r][0] for r in range(3)),
            any(ends for _, ends, _ in ballots),
            any(saves for _, _, saves in ballots),
        )

    with channels(size, None) as (made, each):
        mesh = each(step, made)
    with channels(size, fan_out, nodes) as (made, each):
        assert all(isinstance(channel, TreeChannel) for channel in made)
        assert max(len(channel.sockets()) for channel in made) < size or fan_out == 8
        assert each(step, made) == mesh
        assert each(step, made) == mesh  # the connections have nothing left of the first time
    assert len(set(map(repr, mesh))) == 1


def test_layouts_that_differ_are_seen_by_all():
    def step(channel):
        own = [(1.0, 2.0, 3.0 if channel.rank != 5 else 4.0)]
        channel.send_weights(5, *own)
        return {layout for _, _, layout in channel.receive_weights(5, own, None)}

    with channels(7, 2) as (made, each):
        assert each(step, made) == [{3.0, 4.0}] * 7


@pytest.mark.parametrize("odd", [0, 1, 6])
@pytest.mark.parametrize("fan_out", [1, 2])
def test_all_learn_who_is_not_in_a_sum_or_sums_something_else(odd, fan_out):
    def talk(channel, outside):
        if channel.rank != odd:
            channel.sum(5, addends({"x": 1}), True)
        elif outside:
            channel.send_weights(5, (1.0, 1.0, 1.0))
            channel.receive_weights(5, [(1.0, 1.0, 1.0)], None)
        else:
            channel.sum(5, addends({"y": 1}), True)

    def step(channel, outside):
        with pytest.raises(UsageError) as caught:
            talk(channel, outside)
        return str(caught.value)

    for outside, says in ((True, f"rank {odd} is not: call it"), (False, f"on rank {odd}")):
        with channels(7, fan_out) as (made, each):
            heard = each(partial(step, outside=outside), made)
        assert all(says in text for text in heard), heard


@pytest.mark.parametrize("flag", [NOT_IN_SUM, OTHER_SUM])
def test_no_mistake_of_others_is_taken_for_the_result_of_a_vote(flag):
    with channels(3, 1) as (made, each):

        def step(channel):
            if channel.rank == 0:
                channel._hear(1)
                mistake = Word(kind=Round.SUM, step=5, count=3, latest=0, flags=flag, ranks=(0, 2))
                channel._pass_on(1, pack(mistake))
                return ""
            with pytest.raises(UsageError) as caught:
                vote(channel)
            return str(caught.value)

        assert all("rank 0 is in step.sum(), and rank" in text for text in each(step, made)[1:])


def test_members_at_different_steps_or_in_different_rounds_are_noticed():
    def other_step(channel):
        vote(channel, step=6 if channel.rank == 3 else 5)

    def other_round(channel):
        if channel.rank == 3:
            channel.exchange(5, NOT_ASKED, True)
        else:
            vote(channel)

    def fails(channel, talk):
        try:
            talk(channel)
        except CollectiveFault as error:
            channel.abort()  # as whoever leaves the step does
            return str(error)
        return ""

    for talk, says in ((other_step, "rank 3 is at step 6"), (other_round, "rank 3 is in the round EXCHANGE")):
        with channels(7, 2) as (made, each):
            heard = each(partial(fails, talk=talk), made)
        assert all(heard)
        assert says in heard[1]


class Dies(Exception):
    pass


def dying(channel, moment):
    """Makes a member die around its two sends of a round: to its parent, and to its children."""
    say, pass_on = channel._say, channel._pass_on

    def die():
        channel.abort()
        raise Dies

    def says(word):
        if moment == "before":
            die()
        say(word)
        if moment == "between":
            die()

    def passes_on(child, frame):
        pass_on(child, frame)
        if moment == "first child" or (moment == "after" and child == channel._children[-1]):
            die()

    channel._say, channel._pass_on = says, passes_on


MOMENTS = ["before", "between", "first child", "after"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("size", "fan_out", "dies"), [(4, 1, 1), (4, 1, 2), (7, 2, 1), (7, 2, 2)])
def test_an_inner_member_that_dies_leaves_nobody_with_a_result_that_is_not_all(moment, size, fan_out, dies):
    """Whoever returns from the vote knows that every member was prepared. The others are freed by the coordinator's break."""
    prepared = [False] * size
    outcomes = [""] * size

    with channels(size, fan_out) as (made, each):
        dying(made[dies], moment)

        def step(channel):
            prepared[channel.rank] = True
            try:
                vote(channel)
                assert all(prepared)
                outcomes[channel.rank] = "committed"
            except Dies:
                outcomes[channel.rank] = "dead"
                # What a coordinator does when it hears of that.
                for other in made:
                    other.abort()
            except CollectiveFault:
                outcomes[channel.rank] = "prepared"

        each(step, made)
    assert outcomes[dies] == "dead"
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != dies]
    assert set(others) <= {"committed", "prepared"}
    if moment == "before":  # the root never had the word
        assert set(others) == {"prepared"}


@pytest.mark.parametrize("fan_out", [1, 2])
def test_nothing_is_committed_while_one_member_is_not_prepared(fan_out):
    """R1 and R2: the word of whoever is not there is missing all the way up."""
    with channels(7, fan_out) as (made, each):
        absent, missed = made[5], threading.Event()
        made[absent.parents[absent.rank]].waits = lambda rank: missed.set() if rank == absent.rank else None

        def step(channel):
            if channel is absent:
                assert missed.wait(30)
                for other in made:
                    other.abort()
                return "away"
            try:
                vote(channel)
            except CollectiveFault:
                return "prepared"
            return "committed"

        assert sorted(each(step, made)) == ["away", *["prepared"] * 6]


def test_the_latest_member_is_named_to_all():
    said, late = [[] for _ in range(7)], 4
    with channels(7, 2) as (made, each):
        # All others have said what they can: the root waits for the late one's side, and the other side for the root.
        others = {(0, 1): threading.Event(), (1, late): threading.Event(), (2, 0): threading.Event()}

        def waits(here, rank):
            if (here, rank) in others:
                others[here, rank].set()

        for channel in made:
            channel.late = said[channel.rank].append
            channel.waits = partial(waits, channel.rank)

        def step(channel):
            if channel.rank == late:
                assert all(event.wait(30) for event in others.values())
            vote(channel)

        each(step, made)
    assert said == [[late]] * 7


@pytest.mark.parametrize("fan_out", [1, 2, 8])
def test_keys_reach_the_members_of_their_group_and_words_follow(fan_out):
    nodes = [f"n{rank // 2}" for rank in range(8)]
    size = 300_000

    def share(channel):
        group = channel.rank % 2
        store = channel.store(labels)
        try:
            store.set(f"shard-{group}/key-{channel.rank}", bytes([channel.rank]) * size)
            values = [store.get(f"shard-{group}/key-{rank}") for rank in range(group, 8, 2)]
            store.finish()
            others = [key for key in store._values if not key.startswith(f"shard-{group}")]
        finally:
            store.close()
        assert values == [bytes([rank]) * size for rank in range(group, 8, 2)]
        assert vote(channel) == [(1.0, 0.0, 0.0)]
        with pytest.raises(CollectiveFault, match="no rank has set"):
            store.get("shard-0/none")
        return len(others)

    with channels(8, fan_out, nodes) as (made, each):
        passed = each(share, made)
    if fan_out == 8:  # all leaders below the root, and each node's other member below its leader
        assert passed[3] == passed[5] == passed[7] == 0


def test_a_break_frees_who_waits_for_a_key():
    with channels(7, 2) as (made, each):
        stores = [channel.store(labels) for channel in made]
        waiting = threading.Barrier(7)

        def wait(store):
            waiting.wait(30)
            if store is stores[3]:
                for channel in made:
                    channel.abort()
                return True
            with pytest.raises(CollectiveFault):
                store.get("shard-0/none")
            return True

        assert all(each(wait, stores))
        for store in stores:
            store.close()
            assert not store._thread.is_alive()


def test_more_than_sixteen_members_form_a_tree_by_themselves():
    cluster = Cluster(18)
    groups = cluster.join(1)
    try:
        assert all(isinstance(group.channel, TreeChannel) for group in groups)
        assert [len(group.channel.sockets()) for group in groups] == [8, 9, 2, *[1] * 15]
        assert cluster.each(lambda group: vote(group.channel), groups) == [[(1.0, 0.0, 0.0)]] * 18
        tensors = [torch.full((10,), float(rank)) for rank in range(18)]
        cluster.each(lambda g: g.wait(g.allreduce(tensors[g.rank])), groups)
        assert all(tensor[0] == sum(range(18)) for tensor in tensors)
    finally:
        for group in groups:
            group.abort()
            group.close()
        cluster.close()
