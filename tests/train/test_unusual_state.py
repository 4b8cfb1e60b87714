"""Protected tensors that are made of others, or that lie strangely in memory: trained as without Holdfast, watched, and refused
by name where they could not be restored."""

import copy

import pytest
import torch
from test_state_guard import Points
from torch.nn.functional import cross_entropy
from wrapped import MomentumIn8Bits, Opaque, Quantized, bits, quantized

import holdfast as hf
from holdfast.errors import StateChanged, StateError, UsageError
from holdfast.train import state_image
from holdfast.train.constants import NAME, Constants
from holdfast.train.held_state import EVERY_BLOCKS, ModuleBuffers, StateSums

STEPS = 6


class Network(torch.nn.Module):
    """A quantized base that is frozen, a layer that is trained, and an expanded buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Parameter(quantized((8, 4), seed), requires_grad=False)
        self.head = torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((1, 3), 0.5 + seed).expand(2, 3))

    def forward(self, x):
        return self.head(torch.nn.functional.linear(x, self.base)) * self.scale[0]


def train(model, optimizer, after=lambda step: None, rules=(), until=STEPS):
    """Under Holdfast, alone."""

    def main(run):
        run.protect(model=model, optimizer=optimizer)
        for rule in rules:
            run.buffers(*rule)
        for step in run.steps(Points(), global_batch=8, micro_batch=8, until=until):
            with step:
                for x, y in step:
                    seen.append((x, y))
                    step.backward(cross_entropy(model(x), y, reduction="sum"), weight=len(y))
                step.apply(optimizer)
            after(step)

    seen = []
    hf.start(main)
    return seen


def state(model, optimizer):
    kept = [{k: bits(v) for k, v in s.items()} for s in optimizer.state.values()]
    return [bits(p) for p in (*model.parameters(), *model.buffers())], kept


def test_it_trains_as_without_holdfast():
    model = Network()
    plain = copy.deepcopy(model.head)
    optimizer, alone = (MomentumIn8Bits(m.parameters()) for m in (model.head, plain))
    with torch.no_grad():
        base, scale = model.base.dequantize(), model.scale[0].clone()
    for x, y in train(model, optimizer):
        (
            cross_entropy(plain(torch.nn.functional.linear(x, base)) * scale, y, reduction="sum") / len(y)
        ).backward()
        alone.step()
        alone.zero_grad()
    assert state(model.head, optimizer) == state(plain, alone)


def momentum(optimizer):
    return next(iter(optimizer.state.values()))["momentum"]


CHANGES = {
    "codes": lambda model, optimizer: momentum(optimizer).codes.add_(1),
    "scale": lambda model, optimizer: momentum(optimizer).scale.mul_(2),
    "whole": lambda model, optimizer: momentum(optimizer).copy_(torch.ones(3, 8)),
    "base": lambda model, optimizer: model.base.codes.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_outside_of_the_commit_is_found(change):
    model = Network()
    optimizer = MomentumIn8Bits(model.head.parameters())

    def after(step):
        with torch.no_grad():
            CHANGES[change](model, optimizer)

    where = {
        "scale": r"momentum\.scale",
        "base": r"model\.base",
        "codes": r"momentum\.codes",
        "whole": "momentum",
    }
    with pytest.raises(StateChanged, match=where[change]):
        train(model, optimizer, after)


class Keeping(torch.optim.SGD):
    """Keeps one more tensor for every parameter from its first step on."""

    def __init__(self, parameters, make):
        super().__init__(parameters, lr=0.1)
        self.make = make

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("own", self.make())


REFUSED = {
    "opaque": (lambda: Opaque(torch.ones(3)), "it does not have its own memory"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "windows": (lambda: torch.arange(9.0).as_strided((3, 3), (1, 1)), "share memory"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_optimizer_could_not_get_back_is_refused_in_its_first_step(kind):
    make, why = REFUSED[kind]
    model = torch.nn.Linear(4, 3)
    seen = []
    with pytest.raises(UsageError, match=r"^optimizer\.state\.0\.own: .*" + why):
        train(model, Keeping(model.parameters(), make), lambda step: seen.append(step.index))
    assert seen == [0]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_buffer_that_could_not_be_restored_is_refused_before_the_first_step(kind):
    model = torch.nn.Linear(4, 3)
    model.register_buffer("own", REFUSED[kind][0]())
    seen = []
    with pytest.raises(UsageError, match=r"^model\.own: "):
        train(model, torch.optim.SGD(model.parameters()), seen.append)
    assert seen == []


@pytest.mark.parametrize(
    ("path", "why"), [("model.scale", "an expanded tensor"), ("model.made", "made of other")]
)
def test_no_rule_for_a_buffer_that_is_none(path, why):
    model = Network()
    model.register_buffer("made", quantized((3,)))
    with pytest.raises(UsageError, match=why):
        train(model, torch.optim.SGD(model.head.parameters()), rules=[("restore", path)])


def test_a_dropped_step_leaves_no_trace_in_an_expanded_buffer():
    model = Network()
    buffers = ModuleBuffers(state_image.buffers_of({"model": model}))
    buffers.keep()
    model.scale[:1].fill_(7.0)
    buffers.put_back()
    assert torch.equal(model.scale, torch.full((2, 3), 0.5))


def test_a_buffer_that_is_no_state_may_be_anything():
    model = torch.nn.Linear(4, 3)
    model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    model.register_buffer("opaque", Opaque(torch.ones(3)), persistent=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffers = ModuleBuffers(state_image.buffers_of({"model": model}))
    buffers.keep()
    model.graph.mul_(3)
    buffers.put_back()
    assert torch.equal(model.graph.to_dense(), torch.eye(3))


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_flipped_bit_shows_in_the_sums(part):
    sums = []
    for flipped in (False, True):
        model = torch.nn.Linear(4, 3)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        optimizer = MomentumIn8Bits(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if flipped:
            getattr(momentum(optimizer), part).view(-1).view(torch.uint8)[0] ^= 1
        sums.append(StateSums({"model": model, "optimizer": optimizer}).after(EVERY_BLOCKS))
    assert sums[0] != sums[1]


def test_a_quantized_base_that_never_changes_is_taken_from_others():
    mine, other = Constants({"base": Network()}), Constants({"base": Network(1)})
    image = mine.image()
    assert not other.are_those_of(image.index)
    target = state_image.targets(other.targets, image.index)
    data = b"".join(map(bytes, image.pieces(0, image.index.nbytes)))
    with target.filling(0, len(data)) as pieces:
        at = 0
        for piece in pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
    other.take(target)
    assert other.hashes == mine.hashes
    assert NAME not in other.left_out({"optimizer": MomentumIn8Bits([torch.nn.Parameter(torch.ones(2))])})


def test_a_module_of_other_settings_is_refused_and_not_changed():
    class Other(Quantized):
        pass

    old, new = Network(), Network(1)
    shape = torch.Size((8, 4))
    new.base = torch.nn.Parameter(Other(torch.zeros(8, 4), torch.tensor(1.0), shape), requires_grad=False)
    before = bits(new.base), bits(new.head.weight)
    image = state_image.capture({"model": old}, 0)
    target = state_image.targets({"model": copy.deepcopy(new.head)}, image.index)
    with pytest.raises(StateError, match=r"model\.base is a Other in this script, but a Quantized was saved"):
        state_image.load({"model": new}, target)
    assert (bits(new.base), bits(new.head.weight)) == before
