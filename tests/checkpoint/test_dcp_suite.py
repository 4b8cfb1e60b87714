"""Beside torch's own storage: what its suite tests of a storage plugin (test_file_system_checkpoint, test_fsspec), with
the same state through FileSystemWriter and through the tiers, must end the same, errors included."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import together
from test_dcp import equal, memory  # noqa: F401 - a fixture
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.checkpoint import TieredReader, TieredWriter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def to(tmp_path):
    return str(tmp_path / "saved")


class Nested(torch.nn.Module):
    """Modules in modules, a buffer, a parameter of no dimension, and two names for one tensor."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Sequential(torch.nn.BatchNorm1d(7)))
        self.table = torch.nn.ModuleDict(
            {"a": torch.nn.Embedding(11, 3), "b": torch.nn.Linear(3, 11, bias=False)}
        )
        self.table["b"].weight = self.table["a"].weight
        self.scale = torch.nn.Parameter(torch.randn(()))


def storages(to):
    """The same way to save and to load, twice."""
    return {
        "torch": (lambda: FileSystemWriter(f"{to}-torch"), lambda: FileSystemReader(f"{to}-torch")),
        "tiers": (lambda: TieredWriter(to), lambda: TieredReader(to)),
    }


def outcome(action):
    """What it returned, or which error it was."""
    try:
        return action()
    except CheckpointException as error:
        return sorted(type(e).__name__ for e in error.failures.values())
    except Exception as error:
        return type(error).__name__


def both(to, saved, wanted, save_planner=None, load_planner=None, **how):
    """Saves a state and loads it into another with either storage; returns what each ended with."""
    ends = {}
    for name, (writer, reader) in storages(to).items():
        state = copy.deepcopy(wanted)

        def run(writer=writer, reader=reader, state=state):
            dcp.save(saved, storage_writer=writer(), planner=save_planner and save_planner(), **how)
            dcp.load(state, storage_reader=reader(), planner=load_planner and load_planner(), **how)
            return state

        ends[name] = outcome(run)
    return ends["torch"], ends["tiers"]


def fill(seed, **shapes):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


STATES = {
    "plain": lambda seed: fill(seed, a=(3, 4), b=(7,)),
    "module": lambda seed: dict(Nested(seed).state_dict()),
    "nested": lambda seed: {"model": dict(Nested(seed).state_dict()), "meta": {"epoch": seed, "name": f"run {seed}"}},
    "lists": lambda seed: {"list": [torch.full((2,), float(seed)), seed, [seed, {"x": torch.ones(seed + 1)[:1]}]]},
    "dtypes": lambda seed: {
        str(t): torch.arange(6).add(seed).to(t)
        for t in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64)
    },
    "views": lambda seed: {"t": torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).t(),
                           "step": torch.arange(40.0).add(seed)[3::5]},
    "empty": lambda seed: {"none": torch.zeros(0), "flat": torch.zeros(3, 0, 2), "x": torch.full((1,), float(seed))},
    "scalars": lambda seed: {"zero-d": torch.tensor(float(seed)), "int": seed, "text": "x" * seed, "nothing": None},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_is_saved_is_loaded(to, name):
    theirs, ours = both(to, STATES[name](1), STATES[name](2))
    assert equal(ours, theirs)
    assert equal(ours, STATES[name](1))


def test_a_process_without_a_group_and_with_no_dist(to):
    theirs, ours = both(to, STATES["nested"](1), STATES["nested"](2), no_dist=True)
    assert equal(ours, theirs)
    assert equal(ours, STATES["nested"](1))


SAVED = {"a": torch.arange(6.0), "n": {"b": torch.ones(2, 3), "c": 5}}
WANTED = {
    "fewer": {"a": torch.zeros(6)},
    "only nested": {"n": {"b": torch.zeros(2, 3)}},
    "more": {"a": torch.zeros(6), "new": torch.full((2,), 7.0)},
    "larger": {"a": torch.zeros(7)},
    "another rank": {"a": torch.zeros(2, 3)},
    "another dtype": {"a": torch.zeros(6, dtype=torch.float64)},
    "integers": {"a": torch.zeros(6, dtype=torch.int32)},
    "a view": {"a": torch.zeros(12)[::2]},
    "an object for a tensor": {"n": {"b": 3}},
    "nothing": {},
}


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("name", WANTED)
def test_what_does_not_fit_ends_as_with_torch(to, name, partly):
    planner = (lambda: DefaultLoadPlanner(allow_partial_load=True)) if partly else None
    theirs, ours = both(to, SAVED, WANTED[name], load_planner=planner)
    assert equal(ours, theirs), (ours, theirs)


@pytest.mark.parametrize("flat", [True, False])
def test_states_that_the_planner_does_not_flatten(to, flat):
    state, other = STATES["plain"](1), STATES["plain"](2)
    theirs, ours = both(
        to,
        state,
        other,
        lambda: DefaultSavePlanner(flatten_state_dict=flat),
        lambda: DefaultLoadPlanner(flatten_state_dict=flat),
    )
    assert equal(ours, theirs)
    assert equal(ours, state)


def test_saved_again_under_the_same_name_the_last_one_counts(to):
    got = {}
    for name, (writer, reader) in storages(to).items():
        for value in (1.0, 2.0):
            path = f"{to}-torch" if name == "torch" else "step-5"
            dcp.save({"a": torch.full((4,), value)}, storage_writer=writer(), checkpoint_id=path)
        state = {"a": torch.zeros(4)}
        dcp.load(state, storage_reader=reader())
        got[name] = state["a"].tolist()
    assert got == {"torch": [2.0] * 4, "tiers": [2.0] * 4}


# ---------------------------------------------------------------- several ranks

LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicas": [Replicate()],
}


def whole(seed):
    return torch.randn(13, 6, generator=torch.Generator().manual_seed(seed))


def over_all(to):
    """Every layout saved and loaded as every layout; a module; what each rank has alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ends = {}
    for name, (writer, reader) in storages(to).items():
        state = {k: distribute_tensor(whole(i), mesh, p) for i, (k, p) in enumerate(LAYOUTS.items())}
        state["model"] = get_model_state_dict(Nested(1))
        state["same"] = torch.arange(5.0)
        dcp.save(state, storage_writer=writer())
        shifted = [*LAYOUTS.values()][1:] + [*LAYOUTS.values()][:1]
        into = {
            k: distribute_tensor(torch.zeros(13, 6), mesh, p) for k, p in zip(LAYOUTS, shifted, strict=True)
        }
        into |= {"model": get_model_state_dict(Nested(2)), "same": torch.zeros(5)}
        dcp.load(into, storage_reader=reader())
        model = Nested(3)
        set_model_state_dict(model, into.pop("model"))
        ends[name] = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in into.items()}
        ends[name] |= model.state_dict()
    right = all(torch.equal(ends["tiers"][k], whole(i)) for i, k in enumerate(LAYOUTS))
    return [
        equal(ends["torch"], ends["tiers"]),
        right,
        equal(dict(Nested(1).state_dict()), dict(model.state_dict())),
    ]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_any_sharding_is_loaded_as_any_other(to, world):
    assert together(over_all, world, to) == [[True] * 3] * world
