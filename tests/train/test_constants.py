"""What never changes: hashed once, left out of the state, compared and fetched by newcomers, and found where it changes."""

from functools import partial

import pytest
import torch
from test_peer_transfer import generation_of
from test_state_guard import Points
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.errors import StateChanged, StateError, UsageError
from holdfast.train import state_image
from holdfast.train.constants import NAME, Constants
from holdfast.train.peer_transfer import DonorServer, Fetch

TOKEN = "shared"


class Adapted(torch.nn.Module):
    """A frozen base with a small part beside it that is trained, as LoRA has."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 3)).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 3, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def state_of(model, shard=(0, 1)):
    constants = Constants({"base": model}, shard)
    objects = {"model": model, NAME: constants}
    return constants, state_image.WithConstants(objects, constants.left_out(objects))


def test_the_state_has_the_hash_alone_and_goes_into_a_model_with_the_same_base():
    model, other = Adapted(), Adapted()
    _, state = state_of(model)
    with torch.no_grad():
        model.up.weight.fill_(5.0)
    image = state_image.capture(state, 1)
    assert [spec.path for spec in image.index.tensors] == ["model.down.weight", "model.up.weight"]
    state_image.load(state_of(other)[1], image)
    assert torch.equal(other.up.weight, model.up.weight)
    assert state_image.digest(state) == state_image.digest(state_of(other)[1])


def test_a_state_of_another_base_is_refused():
    image = state_image.capture(state_of(Adapted())[1], 1)
    with pytest.raises(UsageError, match=r"run\.constant\(base=\.\.\.\): its tensors differ"):
        state_image.load(state_of(Adapted(1))[1], image)
    named = Adapted()
    other = state_image.WithConstants(
        {"model": named, NAME: Constants({"frozen": named})}, {"model": {"base.0.weight"}}
    )
    with pytest.raises(UsageError, match=r"run\.constant of \['base'\], but this script has \['frozen'\]"):
        other[NAME].load_state_dict(state_of(named)[0].state_dict())
    state_of(Adapted(1), (0, 2))[0].load_state_dict(state_of(Adapted())[0].state_dict())  # other pieces


@pytest.fixture
def donor():
    server = DonorServer("127.0.0.1", TOKEN, "n0")
    yield server
    server.close()


def fetch_of(donor):
    generation = generation_of([donor])
    came = []
    return Fetch(generation, (0,), TOKEN, lambda n, total: came.append(n), what="constant"), came


def test_a_newcomer_with_the_same_bytes_fetches_none_and_another_all(donor):
    theirs, state = state_of(Adapted())
    donor.publish(4, state_image.capture(state, 7), theirs.image())
    same, _ = state_of(Adapted())
    fetch, came = fetch_of(donor)
    assert same.are_those_of(fetch.index())
    assert not came
    model = Adapted(1)
    other, _ = state_of(model)
    index = fetch.index()
    assert not other.are_those_of(index)
    other.take(fetch.fill(other.targets, index))
    assert sum(came) == index.nbytes == sum(p.nbytes for p in model.base.parameters())
    assert other.hashes == theirs.hashes
    other.load_state_dict(theirs.state_dict())


def test_bytes_that_changed_at_the_peer_are_found_by_who_fetches_them(donor):
    giver = Adapted()
    theirs, state = state_of(giver)
    theirs.state_dict()
    giver.base[0].weight.data[3] = 0.5
    donor.publish(4, state_image.capture(state, 7), theirs.image())
    mine, _ = state_of(Adapted(1))
    fetch, _ = fetch_of(donor)
    with pytest.raises(StateError, match=r"base, of run\.constant, differs on the peer"):
        mine.take(fetch.fill(mine.targets, fetch.index()))


def test_another_model_is_refused(donor):
    theirs, state = state_of(Adapted())
    donor.publish(4, state_image.capture(state, 7), theirs.image())
    model = Adapted()
    model.base[0].bias = None
    fetch, _ = fetch_of(donor)
    with pytest.raises(UsageError, match=r"base\.base\.0\.bias differs from that of the other workers"):
        state_of(model)[0].are_those_of(fetch.index())


def train(change=lambda model, step: None, freeze=True, until=6):
    model = Adapted()
    if not freeze:
        model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def main(run):
        run.constant(base=model)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps(Points(), global_batch=8, micro_batch=4, until=until):
            with step:
                for x, y in step:
                    step.backward(cross_entropy(model(x), y, reduction="sum"), weight=len(x))
                step.apply(optimizer, also=partial(change, model, step.index))

    hf.start(main)
    return model


def test_a_base_that_stays_is_left_alone_and_hashed_twice_in_all(monkeypatch):
    read = []
    reading = Constants._read
    monkeypatch.setattr(Constants, "_read", lambda self: read.append(1) or reading(self))
    model = train()
    assert torch.equal(model.base[0].weight, Adapted().base[0].weight)
    assert not torch.equal(model.up.weight, Adapted().up.weight)
    assert len(read) == 2  # at the start, and after the last step


def counted(model, step):
    if step == 3:
        with torch.no_grad():
            model.base[1].bias += 1


def uncounted(model, step):
    if step == 3:
        model.base[1].bias.data.numpy()[0] += 1


@pytest.mark.parametrize(
    ("change", "when"),
    [
        (counted, "was found changed between step 3's commit and step 4"),
        (uncounted, "changed during training"),
    ],
)
def test_a_change_is_found_in_a_commit_too(change, when, monkeypatch):
    with pytest.raises(StateChanged, match=rf"base\.base\.1\.bias {when}.*it was passed to run\.constant"):
        train(change)


def test_what_cannot_be_constant_is_refused():
    with pytest.raises(UsageError, match=r"run\.constant\(base=\.\.\.\): none of its parameters is frozen"):
        train(freeze=False)
    with pytest.raises(UsageError, match="a list is not a module"):
        hf.start(lambda run: run.constant(base=[]))
