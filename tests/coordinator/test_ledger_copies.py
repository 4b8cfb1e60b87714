"""The ledger outlives its coordinator's machine: agents keep copies, and a successor goes on from the newest."""

import asyncio
import contextlib
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.agent.ledger_copy import LedgerCopy
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service import ledger
from holdfast.coordinator.service.gathering import Choice, Restored, Unusable
from holdfast.coordinator.service.ledger import LedgerCopies, Unreadable, wanted_keepers
from holdfast.coordinator.service.queues import AgentLines, AgentQueue
from holdfast.coordinator.service.store import BATCHES, SNAPSHOT, LedgerBatch, LedgerEntry, Store
from holdfast.protocol import messages as m
from holdfast.protocol.job import JobSpec
from holdfast.protocol.messages import LedgerMark
from holdfast.protocol.wire.frames import Codec

NO_STATE = msgspec.msgpack.encode(CoreState(spec=JobSpec(name="j", script="x.py")))
orders = Codec(m.ToAgent)


def batch(number, note="x"):
    entry = LedgerEntry(seq=number, t_s=float(number), utc="", kind="history", fields={"reason": note})
    kept = {SNAPSHOT: NO_STATE, BATCHES: msgspec.msgpack.encode(number)}
    return LedgerBatch([entry], kept=kept)


def base_of(tmp_path, upto):
    store = Store(tmp_path / "own.sqlite")
    for number in range(1, upto + 1):
        store.write(batch(number))
    data = store.copy()
    store.close()
    return data


def part(number, data=None, base=False, term=1, begins=True, more=False):
    data = msgspec.msgpack.encode(batch(number)) if data is None else data
    return m.KeepLedger(mark=LedgerMark(term, number), data=data, base=base, begins=begins, more=more)


class Node:
    """An agent's copy, written at once."""

    def __init__(self, folder, *parts):
        self.copy = LedgerCopy(folder)
        self.take(*parts)

    def take(self, *parts):
        for one in parts:
            self.copy.keep(one)
            self.copy._put(self.copy._waiting.get_nowait())
        return self


def restored(tmp_path, parts):
    made = Restored(tmp_path / "work")
    for one in parts:
        made.add(one)
    return made.finish(tmp_path / "restored.sqlite")


def entries(tmp_path):
    store = Store(tmp_path / "restored.sqlite", read_only=True)
    try:
        return [entry.seq for entry in store.events()]
    finally:
        store.close()


def test_what_a_node_kept_is_the_ledger_again(tmp_path):
    node = Node(tmp_path / "n", part(3, base_of(tmp_path, 3), base=True), part(4), part(5))
    assert node.copy.mark == LedgerMark(1, 5)
    assert restored(tmp_path, node.copy.parts()) == 5
    assert entries(tmp_path) == [1, 2, 3, 4, 5]


def test_pages_that_the_base_has_already_are_passed_over(tmp_path):
    """The copy of the file is made while batches go on being written: an older state must not take a newer one's place."""
    node = Node(tmp_path / "n", part(3, base_of(tmp_path, 5), base=True), *map(part, (4, 5, 6)))
    assert restored(tmp_path, node.copy.parts()) == 6
    assert entries(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_large_ones_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "PART_BYTES", 1000)
    monkeypatch.setattr("holdfast.agent.ledger_copy.PART_BYTES", 700)
    data, more = base_of(tmp_path, 3), msgspec.msgpack.encode(batch(4, "y" * 5000))
    sent = [
        *ledger._parts(LedgerMark(1, 3), data, base=True),
        *ledger._parts(LedgerMark(1, 4), more, base=False),
    ]
    assert len(sent) > 20
    node = Node(tmp_path / "n", *sent)
    assert len(list(node.copy.parts())) > 25
    assert restored(tmp_path, node.copy.parts()) == 4


def test_a_copy_with_a_gap_is_given_up_until_the_next_base(tmp_path):
    node = Node(tmp_path / "n", part(3, base_of(tmp_path, 3), base=True), part(5))
    assert node.copy.mark == LedgerMark()
    assert [one.last for one in node.copy.parts()] == [True]
    node.take(part(6))
    assert node.copy.mark == LedgerMark()
    node.take(part(4, base_of(tmp_path, 4), base=True), part(5))
    assert node.copy.mark == LedgerMark(1, 5)


def test_a_part_of_a_page_or_base_that_was_cut_off_is_forgotten(tmp_path):
    data = base_of(tmp_path, 3)
    node = Node(
        tmp_path / "n",
        part(3, data[:100], base=True, more=True),
        part(3, data, base=True),
        part(4, b"half", more=True),
        part(4),
    )
    assert restored(tmp_path, node.copy.parts()) == 4


def test_an_agent_that_is_started_again_has_what_it_kept(tmp_path):
    Node(tmp_path / "n", part(3, base_of(tmp_path, 3), base=True), part(4), part(5))
    with (tmp_path / "n" / "ledger.pages").open("r+b") as batches:
        batches.truncate(batches.seek(0, 2) - 7)  # it was killed while it wrote the last one
    again = Node(tmp_path / "n")
    assert again.copy.mark == LedgerMark(1, 4)
    again.take(part(5), part(6))
    assert restored(tmp_path, again.copy.parts()) == 6


def test_an_agent_that_is_killed_between_two_files_has_no_copy(tmp_path, monkeypatch):
    """Not an old base under the mark of a new one, which would be taken for the newest of all."""
    older, newer = base_of(tmp_path, 3), base_of(tmp_path, 9)
    steps = [(Path, "unlink"), (Path, "replace"), (Path, "open")]
    for left in range(9):  # more than there are
        folder = tmp_path / f"n{left}"
        Node(folder, part(3, older, base=True))
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            calls = iter(range(left))
            for owner, name in steps:
                patch.setattr(owner, name, killed_after(calls, getattr(owner, name)))
            Node(folder, part(9, newer, base=True))
        kept = Node(folder).copy
        if kept.mark.batch:
            assert restored(tmp_path, kept.parts()) == kept.mark.batch, left


def killed_after(calls, function):
    def call(*args, **more):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*args, **more)

    return call


@pytest.mark.parametrize("wrong", ["no-base", "gap", "two-bases", "garbage", "cut"])
def test_what_is_no_ledger_is_refused(tmp_path, wrong):
    data = base_of(tmp_path, 3)
    base = m.LedgerKept(mark=LedgerMark(1, 3), data=data, base=True)
    four = m.LedgerKept(mark=LedgerMark(1, 4), data=msgspec.msgpack.encode(batch(4)))
    five = m.LedgerKept(mark=LedgerMark(1, 5), data=msgspec.msgpack.encode(batch(5)))
    parts = {
        "no-base": [four],
        "gap": [base, five],
        "two-bases": [base, base],
        "garbage": [base, m.LedgerKept(mark=LedgerMark(1, 4), data=b"\xc1")],
        "cut": [m.LedgerKept(mark=LedgerMark(1, 3), data=data[:50], base=True, more=True)],
    }[wrong]
    with pytest.raises(Unusable):
        restored(tmp_path, parts)
    assert not (tmp_path / "restored.sqlite").exists()


# ------------------------------------------------------------------- who keeps, and whose copy counts


def node_at(place="", machine=""):
    return SimpleNamespace(alive=True, place=tuple(place.split("/")) if place else (), identity=machine)


def test_copies_stand_far_from_each_other():
    nodes = {
        "a": node_at("z/r1"),
        "b": node_at("z/r1"),
        "c": node_at("z/r2"),
        "d": node_at("y/r9"),
        "e": node_at(),
    }
    assert wanted_keepers(nodes, [], 2, "") == ["a", "d"]
    assert wanted_keepers(nodes, ["a"], 3, "") == ["a", "d", "e"]
    assert wanted_keepers({name: nodes[name] for name in "abc"}, ["a"], 2, "") == ["a", "c"]
    assert wanted_keepers({"a": node_at()}, [], 2, "") == ["a"]
    assert wanted_keepers(nodes, ["a", "d"], 2, "") == ["a", "d"]
    parts = {name: node_at("z/r1", f"serial:{machine}") for name, machine in zip("abc", "112", strict=True)}
    assert wanted_keepers(parts, [], 2, "") == ["a", "c"]


def test_a_copy_beside_the_coordinator_counts_only_where_there_is_no_other():
    """It is lost with the coordinator's machine: just when it is asked for."""
    nodes = {
        "a": node_at("z/r1", "serial:1"),
        "b": node_at("z/r2", "serial:2"),
        "c": node_at("z/r2", "serial:3"),
    }
    assert wanted_keepers(nodes, [], 2, "serial:1") == ["b", "c"]
    assert wanted_keepers(nodes, ["a", "b"], 2, "serial:1") == ["b", "c"]
    assert wanted_keepers({name: nodes[name] for name in "ab"}, [], 2, "serial:1") == ["b", "a"]
    assert wanted_keepers({"a": nodes["a"]}, [], 2, "serial:1") == ["a"]


def test_the_newest_copy_counts_and_a_later_term_before_a_longer_one():
    choice = Choice(nodes=3, orphan_s=60.0, began_s=0.0)
    assert (choice.newest(), choice.due_s()) == (None, 60.0)
    choice.hear("a", LedgerMark(1, 900), 5.0)
    # It is one of three: another one may keep what was decided last.
    assert (choice.newest(), choice.due_s(), choice.is_due(7.9)) == ("a", 8.0, False)
    assert choice.is_due(8.0)
    choice.hear("b", LedgerMark(2, 40), 5.2)
    assert (choice.newest(), choice.due_s(), choice.is_due(5.4), choice.is_due(5.5)) == (
        "b",
        5.5,
        False,
        True,
    )
    choice.hear("c", None, 5.3)
    assert choice.is_due(5.3)  # there is nobody to wait for
    choice.refuse("b")
    assert choice.newest() == "a"
    choice.refuse("a")
    assert choice.newest() is None


def test_new_nodes_alone_begin_anew_and_a_missing_one_is_waited_for():
    """The copies may be where it is."""
    choice = Choice(nodes=2, orphan_s=60.0, began_s=100.0)
    choice.hear("a", None, 101.0)
    assert (choice.is_due(101.0), choice.is_due(159.0), choice.is_due(160.0)) == (False, False, True)
    choice.hear("b", None, 102.0)
    assert choice.is_due(102.0)


# ------------------------------------------------------------------- the coordinator's side


class Sender:
    """A coordinator's copies, and what it sends."""

    def __init__(self, count=2):
        self.lines, self.reads, self.nodes = AgentLines(), [], {}
        self.copies = LedgerCopies(
            count=count, term=1, machine="serial:1", lines=self.lines, read_base=self.read
        )

    async def read(self):
        reading = asyncio.get_running_loop().create_future()
        self.reads.append(reading)
        return await reading

    def join(self, node, machine=""):
        self.nodes[node] = node_at(machine=machine)
        line = self.lines.by_node[node] = AgentQueue(node, f"session of {node}", None)
        line.introduced = True
        self.choose()

    async def give_file(self):
        self.reads.pop().set_result(b"file")
        await turns()

    def choose(self):
        self.copies.choose(self.nodes)

    def sent(self, node):
        line, found = self.lines.by_node[node], []
        while not line.empty():
            found.append(orders.decode(line.get_nowait()))
        return [(one.base, one.mark.batch) for one in found]


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(test(Sender()))


def test_a_keeper_gets_the_file_and_then_each_page():
    async def test(sender):
        sender.copies.on_batch(1, batch(1))
        sender.join("a")
        await turns()
        sender.copies.on_batch(2, batch(2))
        assert sender.sent("a") == []
        await sender.give_file()
        sender.copies.on_batch(3, batch(3))
        assert sender.sent("a") == [(True, 1), (False, 2), (False, 3)]

    run(test)


def test_a_page_that_comes_before_the_file_is_read_continues_it(tmp_path):
    """As where a batch is written in the moment in which a node joins: the node must not take it for a repetition."""

    async def test(sender):
        sender.copies.on_batch(1, batch(1))
        sender.join("a")
        sender.copies.on_batch(2, batch(2))
        await turns()
        await sender.give_file()
        sent = sender.sent("a")
        assert sent == [(True, 1), (False, 2)]
        node = Node(tmp_path / "n", *(part(number, base=base) for base, number in sent))
        assert node.copy.mark == LedgerMark(1, 2)

    run(test)


def test_a_keeper_that_connected_again_gets_the_file_again():
    async def test(sender):
        sender.join("a")
        await turns()
        await sender.give_file()
        sender.sent("a")
        del sender.lines.by_node["a"]
        sender.copies.on_batch(1, batch(1))
        sender.join("a")
        await turns()
        sender.copies.on_batch(2, batch(2))
        assert sender.sent("a") == []
        await sender.give_file()
        assert sender.sent("a") == [(True, 1), (False, 2)]

    run(test)


def test_no_more_agents_are_asked_than_wanted_and_one_that_goes_is_replaced():
    async def test(sender):
        for node in "abc":
            sender.join(node)
        await turns()
        assert len(sender.reads) == 2
        del sender.lines.by_node["b"]
        sender.choose()
        await turns()
        for reading in sender.reads:
            reading.set_result(b"file")
        await turns()
        assert (sender.sent("a"), sender.sent("c")) == ([(True, 0)], [(True, 0)])

    run(test)


def test_a_node_that_is_lost_is_replaced_while_its_connection_stands():
    """To a machine without power it stands for minutes, and the next fault may be the coordinator's machine."""

    async def test(sender):
        for node in "ab":
            sender.join(node)
        await turns()
        for reading in sender.reads:
            reading.set_result(b"file")
        await turns()
        sender.nodes["a"].alive = False
        sender.join("c")
        sender.copies.on_batch(1, batch(1))
        await turns()
        assert len(sender.reads) == 3
        sender.reads[2].set_result(b"file")
        await turns()
        sender.choose()
        assert sender.sent("c") == [(True, 0), (False, 1)]
        # It may only have been cut off: what it has is old, and it is told so once another one has the ledger.
        assert sender.sent("a") == [(True, 0), (True, 0)]
        sender.nodes["a"].alive = True
        sender.choose()
        sender.copies.on_batch(2, batch(2))
        assert sender.sent("a") == []
        assert sender.sent("b") == [(True, 0), (False, 1), (False, 2)]

    run(test)


def test_older_copies_end_when_there_are_newer_ones(tmp_path):
    async def test(sender):
        sender.lines.with_copy = {"a", "c", "away"}
        for node in "abc":
            sender.join(node)
        await turns()
        sender.reads[0].set_result(b"file")
        await turns()
        sender.choose()
        assert sender.lines.by_node["c"].empty()
        sender.reads[1].set_result(b"file")
        await turns()
        sender.choose()
        (told,) = [orders.decode(sender.lines.by_node["c"].get_nowait())]
        assert sender.lines.by_node["c"].empty()
        assert sender.lines.with_copy == set()
        node = Node(tmp_path / "n", part(3, base_of(tmp_path, 3), base=True), part(4), told)
        assert (node.copy.mark, [one.last for one in node.copy.parts()]) == (LedgerMark(), [True])
        assert (Node(tmp_path / "n").copy.mark, list((tmp_path / "n").iterdir())) == (LedgerMark(), [])
        node.take(part(9, base_of(tmp_path, 9), base=True), part(10))
        assert node.copy.mark == LedgerMark(1, 10)

    run(test)


def test_a_node_beside_the_coordinator_keeps_a_copy_until_others_can():
    async def test(sender):
        sender.join("a", "serial:1")
        sender.join("b", "serial:2")
        await turns()
        sender.join("c", "serial:3")
        sender.join("d", "serial:4")
        await turns()
        for reading in sender.reads:
            reading.set_result(b"file")
        await turns()
        assert [sender.sent(node) for node in "abcd"] == [[(True, 0)], [(True, 0)], [(True, 0)], []]

    run(test)


@pytest.mark.parametrize("seed", range(60))
def test_after_any_losses_two_others_have_all_pages(seed):
    """Nodes on three machines come, are lost with their connections or without, are slow, come back, and connect again."""
    rng = random.Random(seed)

    async def test(sender):
        marks = {}
        last = 0

        def deliver(node):
            for base, number in sender.sent(node) if node in sender.lines.by_node else ():
                if base:
                    marks[node] = number
                elif marks.get(node):
                    marks[node] = number if number == marks[node] + 1 else 0

        def connect(node):
            if marks.get(node):
                sender.lines.with_copy.add(node)  # as its hello says
            sender.join(node, f"serial:{1 + int(node[1:]) % 3}")

        for _ in range(100):
            node = f"n{rng.randrange(9)}"
            known = sender.nodes.get(node)
            kept = {
                name for name, mark in marks.items() if mark and name != node and sender.nodes[name].alive
            }
            acts = rng.choice(["come", "file"] if rng.random() < 0.6 else ["lose", "pause", "cut", "return"])
            match acts:
                case "come" if node not in sender.lines.by_node or rng.random() < 0.2:
                    connect(node)
                case "lose" if known is not None:  # its machine is gone: the connection stands
                    known.alive = False
                    marks.pop(node, None)
                case "pause" if known is not None:  # it is only slow
                    known.alive = False
                case "cut" if known is not None:
                    known.alive = False
                    deliver(node)
                    sender.lines.by_node.pop(node, None)
                case "return" if known is not None and node in sender.lines.by_node:
                    known.alive = True
                case "file" if sender.reads:
                    await sender.give_file()
            sender.copies.on_batch(last := last + 1, batch(last))
            sender.choose()
            await turns()
            for other in list(sender.nodes):
                if sender.nodes[other].alive:
                    deliver(other)
            living = [name for name in marks if sender.nodes[name].alive]
            assert not kept or any(marks[name] for name in living), "the last copy was ended"
        while sender.reads:
            await sender.give_file()
        sender.choose()
        sender.copies.on_batch(last := last + 1, batch(last))
        there = {node for node in sender.lines.by_node if sender.nodes[node].alive}
        for node in there:
            deliver(node)
        apart = {node for node in there if sender.nodes[node].identity != "serial:1"}
        whole = {node for node in there if marks.get(node) == last}
        assert len(whole & apart) == min(2, len(apart))
        assert len(whole) >= min(2, len(there))
        # Nobody else who can be heard has an older one.
        assert {node for node in there if marks.get(node)} == whole

    run(test)


def test_without_copies_no_file_is_read():
    async def test(sender):
        sender.join("a")
        sender.copies.on_batch(1, batch(1))
        await turns()
        assert (sender.reads, sender.sent("a")) == ([], [])

    asyncio.run(test(Sender(count=0)))


def test_a_keeper_whose_new_file_cannot_be_read_ends_its_old_copy():
    async def test(sender):
        for node in "abc":
            sender.join(node)
        await turns()
        for reading in sender.reads:
            reading.set_result(b"file")
        await turns()
        sender.copies._begin("a", sender.copies._keepers["a"])
        await turns()
        sender.reads[2].set_exception(Unreadable("the disk"))
        await turns()
        sender.nodes["a"].alive = False
        sender.choose()
        await turns()
        sender.reads[3].set_result(b"file")
        await turns()
        sender.choose()
        assert sender.sent("c") == [(True, 0)]
        assert sender.sent("a") == [(True, 0), (True, 0)]

    run(test)


def test_what_a_keeper_has_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(ledger, "BASE_AGAIN_BYTES", 1000)

    async def test(sender):
        sender.join("a")
        await turns()
        await sender.give_file()
        sender.copies.on_batch(1, batch(1, "z" * 2000))
        await turns()
        sender.copies.on_batch(2, batch(2))
        await sender.give_file()
        assert sender.sent("a") == [(True, 0), (False, 1), (True, 1), (False, 2)]

    run(test)
