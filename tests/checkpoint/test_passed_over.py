"""Which of the states that a script gives are kept: by a cadence, by all ranks alike, and in any case the newest."""

import threading
from types import SimpleNamespace

import pytest
import torch

from holdfast.checkpoint import agent_link, api, backends
from holdfast.checkpoint.backends import Turns
from holdfast.checkpoint.loading import SMALL_BYTES
from holdfast.checkpoint.memory import map_blob
from holdfast.checkpoint.policy import parse_cadence
from holdfast.errors import TierError
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Key
from holdfast.tensors.index import decode_index
from holdfast.train.link import Link

LARGE = SMALL_BYTES // 4 + 100


class Board:
    """What the first of two ranks has said, for both."""

    def __init__(self):
        self.said, self.patience = {}, []

    def rank(self, number):
        return Ranks(self, number)


class Ranks:
    def __init__(self, board, number):
        self.board, self.share = board, (number, 2)

    def from_first(self, about, value, patience_s=None):
        if not self.share[0]:
            self.board.said[about] = value
        elif about not in self.board.said:
            self.board.patience.append(patience_s)
            raise TierError("not said")
        return self.board.said[about]

    def forget(self, about):
        del self.board.said[about]


@pytest.fixture
def board():
    return Board()


def kept(turns, steps, room=lambda step: True):
    """The steps that the first rank keeps."""
    there = []
    for step in steps:
        if turns.is_due(step):
            turns.tell(step, room(step))
            if room(step):
                there.append(step)
    return there


@pytest.mark.parametrize(
    ("cadence", "begins_at", "given", "there"),
    [
        ("50", 0, range(1, 151), [50, 100, 150]),
        ("50", 0, range(7, 150, 7), [56, 105]),
        ("50", 120, range(121, 160), [150]),
        ("auto", 0, range(1, 5), [1, 2, 3, 4]),
        ("0", 0, range(1, 5), []),
    ],
)
def test_a_cadence_of_steps_is_heeded_whatever_steps_a_script_gives(board, cadence, begins_at, given, there):
    turns = Turns(parse_cadence(cadence), board.rank(0), 2)
    turns.begins_at(begins_at)
    assert kept(turns, given) == there


def test_one_that_was_due_and_found_no_room_is_due_again(board):
    turns = Turns(parse_cadence("10"), board.rank(0), 2)
    assert kept(turns, range(1, 31), room=lambda step: step not in (10, 11)) == [12, 20, 30]


def test_of_time_the_first_rank_is_the_judge(board, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(backends.time, "monotonic", lambda: now[0])
    first, second = (Turns(parse_cadence("10s"), board.rank(rank), 2) for rank in (0, 1))
    there, other = [], []
    for step in range(1, 10):
        now[0] += 4
        there += kept(first, [step])
        other += [step] if second.is_due(step) and second.taken(step) else []
    assert there == other == [3, 6, 9]


def test_all_ranks_skip_the_same_steps(board):
    first, second = (Turns(parse_cadence("auto"), board.rank(rank), 2) for rank in (0, 1))
    there = kept(first, range(1, 7), room=lambda step: step % 2)
    assert [step for step in range(1, 7) if second.taken(step)] == there == [1, 3, 5]


def test_a_rank_that_gave_one_more_heeds_the_words_on_its_own_steps(board):
    first, second = (Turns(parse_cadence("auto"), board.rank(rank), 2) for rank in (0, 1))
    kept(first, [1, 2, 4, 5, 5], room=lambda step: step != 4)
    assert [second.taken(step) for step in (1, 3, 2, 4, 5)] == [True, True, True, False, True]
    assert board.patience == [backends.TURN_S]


def test_a_first_rank_that_never_says_anything_is_not_waited_for_each_time(board):
    second = Turns(parse_cadence("auto"), board.rank(1), 2)
    assert [second.taken(step) for step in (1, 2, 3)] == [True, True, True]
    assert board.patience[0] == backends.TURN_S
    assert max(board.patience[1:]) < 1


def test_what_was_said_long_ago_is_not_kept(board):
    kept(Turns(parse_cadence("auto"), board.rank(0), 2), range(1, 2000))
    assert len(board.said) == backends.TURNS_KEPT


class Agent:
    """A node's agent that has room when the test says so."""

    def __init__(self, folder, cadence):
        env = {"HOLDFAST_GENERATION": "1", "HOLDFAST_SNAPSHOT_EVERY": cadence}
        self.start, self.record = SimpleNamespace(env=env), SimpleNamespace(committed=0)
        self.token, self.notices = "t", None
        self.folder, self.room, self.there, self.asked = folder, True, {}, []

    def send(self, message):
        if isinstance(message, m.SlotWanted):
            self.asked.append(message)
            self.path = self.folder / f"{message.key.step}.slot"
            with self.path.open("wb") as file:
                file.truncate((1 << 20) + 4096)
        if isinstance(message, m.SlotFilled) and message.index is not None:
            index = decode_index(message.index)
            with self.path.open("r+b") as file:
                blob = map_blob(file.fileno(), 1 << 20)[4096 : 4096 + index.nbytes]
            self.there[message.key.step] = index, bytes(blob)

    def wait_slot(self, key, timeout_s):
        if self.room or self.asked[-1].waits:
            return m.SlotGiven(key, str(self.path))
        return m.SlotGiven(key, None, "still being copied", paced=True)


@pytest.fixture
def agent(tmp_path, monkeypatch, request):
    agent = Agent(tmp_path, getattr(request, "param", "auto"))
    monkeypatch.setattr(api, "_backends", {})
    agent_link.attach(agent)
    yield agent
    agent_link.detach()
    api._passed_over.clear()


@pytest.mark.parametrize("agent", ["auto", "10"], indirect=True)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_newest_state_is_kept_at_the_end_though_it_was_passed_over(agent, overlap):
    weight = torch.zeros(LARGE)
    for step in (1, 2):
        weight.fill_(step)
        agent.room = step < 2
        saved = api.save({"weight": weight, "n": step}, step, overlap=overlap)
    assert saved is (overlap or agent.start.env["HOLDFAST_SNAPSHOT_EVERY"] == "10")
    api.wait_for_copy()
    assert 2 not in agent.there
    api.flush()
    _, blob = agent.there[2]
    assert torch.equal(torch.frombuffer(bytearray(blob), dtype=torch.float32), weight)
    assert agent.asked[-1].waits
    asked = len(agent.asked)
    api.flush()
    assert len(agent.asked) == asked


def by_an_optimizer(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


def through_data(weight):
    """As some optimizers write: no version of the tensor counts it."""

    class Old(torch.optim.Optimizer):
        def step(self):
            weight.data.add_(1)

    Old([weight], {}).step()


CHANGES = [lambda weight: weight.add_(1), by_an_optimizer, through_data]


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_found_no_room_is_kept_as_it_was(agent, change):
    agent.room = False
    weight = torch.zeros(LARGE)
    assert not api.save({"weight": weight}, 1)
    change(weight)
    api.flush()
    (_, blob) = agent.there[1]
    assert blob == bytes(4 * LARGE)


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_has_changed_is_not_kept_under_the_number_of_its_step(agent, monkeypatch, change):
    monkeypatch.setattr(api, "COPIED_BYTES", 0)  # it is too large for a copy
    agent.room = False
    weight = torch.zeros(LARGE)
    assert not api.save({"weight": weight}, 1)
    change(weight)
    api.flush()
    assert agent.there == {}


def test_a_state_of_small_tensors_was_copied_with_its_values(agent):
    agent.room = False
    weight = torch.zeros(3)
    assert not api.save({"weight": weight}, 1)
    weight.add_(1)
    api.flush()
    (index, blob) = agent.there[1]
    assert [blob, index.tree["weight"][1][2]] == [b"", bytes(12)]


def test_a_newer_state_that_is_kept_takes_its_place(agent):
    weight = torch.zeros(LARGE)
    agent.room = False
    api.save({"weight": weight}, 1)
    agent.room = True
    api.save({"weight": weight}, 2)
    api.flush()
    assert list(agent.there) == [2]


def test_a_slot_may_be_asked_for_again_and_that_has_an_answer_of_its_own():
    link, key = Link.__new__(Link), Key(5, 1, 0, 1)
    link._news, link._slot = threading.Condition(), m.SlotGiven(key, None, "no room")
    assert link.wait_slot(key, 0.0) == m.SlotGiven(key, None, "no room")
    assert link.wait_slot(key, 0.0) is None
