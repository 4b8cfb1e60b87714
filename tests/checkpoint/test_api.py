"""`hf.checkpoint.save` and `load`: what was saved comes back, into the same tensors, whatever it is made of."""

import errno
import multiprocessing
import os
import random
import threading
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from blobs_on_tiers import flip
from ranks import together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast.checkpoint import api, backends
from holdfast.checkpoint.api import flush, load, save, wait_for_copy
from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.loading import SMALL_BYTES
from holdfast.errors import StateError, UsageError
from holdfast.observe import transfer_progress
from holdfast.protocol import messages as m

LARGE = SMALL_BYTES // 4 + 100  # float32s that go into the blob


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path_factory):
    """Every test has places of its own, in memory of its own that nothing is left of."""
    root = backends.Path("/dev/shm") / f"holdfast-test-{uuid.uuid4().hex}"
    monkeypatch.setenv("HOLDFAST_MEMORY", str(root))
    monkeypatch.delenv("HOLDFAST_CHECKPOINT", raising=False)
    monkeypatch.setattr(api, "_backends", {})
    yield root
    wait_for_copy()
    for place in api._backends.values():
        place.close()
    assert not list(root.rglob("*"))
    if root.exists():
        root.rmdir()


@pytest.fixture
def to(tmp_path):
    return str(tmp_path / "saved")


def model_of(seed=0, wide=64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(wide, 96), torch.nn.BatchNorm1d(96), torch.nn.GELU(), torch.nn.Linear(96, 8)
    )


def step(model, optimizer, seed):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def bits(value):
    """A state as something that is equal only when every bit is."""
    if isinstance(value, torch.Tensor):
        value = value.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        data = bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
        return (str(value.dtype), tuple(value.shape), data)
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    return (type(value).__name__, value)


def later(to, state, step=5):
    """Saves and waits."""
    assert save(state, step, to=to)
    flush()


# ---------------------------------------------------------------- what comes back


def test_a_training_goes_on_as_if_nothing_had_happened(to):
    def begin(seed):
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            ],
            [3],
        )
        scaler = torch.amp.GradScaler("cpu")
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "seen": 0}

    def run(state, first, last):
        for i in range(first, last):
            step(state["model"], state["optimizer"], i)
            state["schedule"].step()
            state["seen"] += 16

    def all_of(state):
        return {k: bits(v.state_dict() if hasattr(v, "state_dict") else v) for k, v in state.items()}

    state = begin(0)
    run(state, 0, 5)
    state["scaler"]._scale = torch.tensor(17.0)
    later(to, state)
    saved = all_of(state)
    run(state, 5, 9)

    fresh = begin(1)  # its optimizer has no moments yet
    assert load(fresh, source=to) == 5
    assert all_of(fresh) == saved
    run(fresh, 5, 9)
    assert all_of(fresh) == all_of(state)


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.uint8, torch.int64,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 7, 70_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_every_dtype_and_size(to, dtype, count):
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64) % 251
    raw = raw % 2 if dtype == torch.bool else raw
    value = raw.to(torch.uint8).view(dtype)
    saved = bits(value)
    later(to, {"a": torch.zeros(9001, dtype=torch.uint8), "b": value})
    target = torch.zeros(count).to(dtype)
    assert load({"a": torch.ones(9001, dtype=torch.uint8), "b": target}, source=to) == 5
    assert bits(target) == saved


def test_shapes_and_layouts_of_every_kind(to):
    big = torch.randn(200, 300)
    state = {
        "odd": torch.arange(9001).to(torch.uint8),  # what follows begins at an odd byte
        "transposed": big.t(),
        "strided": big[::2, 1::3],
        "expanded": torch.randn(300).expand(100, 300),
        "channels": torch.randn(8, 3, 20, 20).contiguous(memory_format=torch.channels_last),
        "conj": torch.randn(3000, dtype=torch.complex64).conj(),
        "neg": torch.randn(3000, dtype=torch.complex64).conj().imag,
        "small conj": torch.randn(3, dtype=torch.complex64).conj(),
        "one of a stride": torch.arange(10.0)[3::2][:1],
        "parameter": torch.nn.Parameter(torch.randn(50, 60)),
        "zero-d": torch.tensor(3.5),
        "nothing": torch.zeros(0, 5),
        "large nothing": torch.zeros(5, 0, 7),
    }
    saved = bits(state)
    later(to, state)
    fresh = {k: torch.zeros_like(v) for k, v in state.items()}
    fresh["expanded"] = torch.zeros(100, 300)
    assert load(fresh, source=to) == 5
    assert bits(fresh) == saved


def test_plain_values_of_every_kind(to):
    state = {
        "plain": {
            "none": None, "yes": True, "int": -3, "float": 0.1, "nan": float("inf"), "text": "ß",
            "list": [1, [2.5, "x"], (3, None)], "empty": [{}, [], ()], 7: "by number",
            "large": [2**64 - 1, -(2**63), 2**127 + 1, -(2**64)],
        },
        "numpy": np.float64(0.25),
        "numpy generator": np.random.default_rng(5).bit_generator.state,
        "python generator": random.getstate(),
        "torch generator": torch.get_rng_state(),
    }  # fmt: skip
    saved = bits(state)
    saved["numpy"] = ("float", 0.25)
    later(to, state)
    fresh = dict.fromkeys(state, 0) | {"torch generator": torch.zeros_like(torch.get_rng_state())}
    fresh["plain"] = {"int": 5, "gone": 1}
    assert load(fresh, source=to) == 5
    assert bits(fresh) == saved
    random.setstate(fresh["python generator"])
    assert np.random.default_rng(0).bit_generator.state["state"]["state"] > 2**64


def test_random_numbers_go_on(to):
    def draws():
        return random.random(), torch.rand(3).tolist()

    random.seed(3)
    torch.manual_seed(3)
    later(to, {"python": random.getstate(), "torch": torch.get_rng_state()})
    right = draws()
    fresh = {"python": None, "torch": torch.get_rng_state()}
    load(fresh, source=to)
    random.setstate(fresh["python"])
    torch.set_rng_state(fresh["torch"])
    assert draws() == right


def test_tensors_are_filled_in_place_and_their_containers_stay(to):
    def state_of(value):
        large, small = torch.full((LARGE,), value), torch.full((3,), value)
        return {
            "large": large,
            "small": small,
            "nested": {"list": [large.clone(), small.clone(), value], "tuple": (small.clone(), value)},
        }

    later(to, state_of(2.0))
    fresh = state_of(1.0)
    nested = fresh["nested"]
    before = [fresh["large"], fresh["small"], nested, nested["list"], *nested["list"][:2], nested["tuple"][0]]
    load(fresh, source=to)
    after = [fresh["large"], fresh["small"], fresh["nested"], nested["list"], *nested["list"][:2]]
    after.append(nested["tuple"][0])
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert bits(fresh) == bits(state_of(2.0))


def test_parameters_stay_the_same_objects(to):
    later(to, {"model": model_of(0)})
    model = model_of(1)
    before = list(model.parameters())
    load({"model": model}, source=to)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert bits(dict(model.state_dict())) == bits(dict(model_of(0).state_dict()))


def test_a_list_of_plain_values_may_have_grown(to):
    later(to, {"losses": [3.0, 2.0, 1.0], "notes": {"a": {"b": 1}}, "w": torch.zeros(3)})
    fresh = {"losses": [], "notes": {}, "w": torch.ones(3)}
    losses = fresh["losses"]
    assert load(fresh, source=to) == 5
    assert fresh["losses"] is losses
    assert [fresh["losses"], fresh["notes"]] == [[3.0, 2.0, 1.0], {"a": {"b": 1}}]


def test_steps_by_number(to):
    for number in (0, 5, 10):
        later(f"{to},keep=9", {"w": torch.full((LARGE,), float(number))}, number)
    target = {"w": torch.zeros(LARGE)}
    for wanted, got in ((5, 5), (0, 0), (None, 10), (7, None)):
        assert load(target, source=to, step=wanted) == got
        if got is not None:
            assert target["w"][0] == got


def test_a_state_that_the_script_has_otherwise_is_kept_when_it_is_newer(to):
    for number in (5, 10):
        later(f"{to},keep=9", {"w": torch.full((LARGE,), float(number))}, number)
    target = {"w": torch.zeros(LARGE)}
    for own, got, value in ((11, None, 0.0), (10, None, 0.0), (9, 10, 10.0)):
        assert load(target, source=to, newer_than=own) == got
        assert target["w"][0] == value


def test_a_damaged_snapshot_is_no_reason_to_stop_where_there_is_another_state(to):
    later(to, {"w": torch.zeros(LARGE)}, 10)
    archive = Archive(to)
    flip(archive.tier, archive.manifest(10).shards[0].head.name, 7)
    assert load({"w": torch.zeros(LARGE)}, source=to, newer_than=9) is None


def test_nothing_there(to):
    assert load({"w": torch.zeros(3)}, source=to) is None


def test_the_environment_says_where_to(to, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CHECKPOINT", to)
    assert save({"w": torch.ones(3)}, 5)
    assert load({"w": torch.zeros(3)}) == 5


def test_a_load_waits_for_every_save_before_it(to):
    for number in range(1, 6):
        save({"w": torch.full((LARGE,), float(number))}, number, to=f"{to},keep=1")
        wait = load({"w": torch.zeros(LARGE)}, source=to)
        assert wait == number


# ---------------------------------------------------------------- what is refused


def differences(state, to):
    before = bits(state)
    with pytest.raises(
        StateError, match="does not match the state of this script; nothing was loaded"
    ) as caught:
        load(state, source=to)
    assert bits(state) == before
    return str(caught.value).split("\n  ")[1:]


def test_differences_are_listed_and_nothing_is_changed(to):
    a, b = torch.ones(LARGE), torch.ones(3)
    later(to, {"a": a, "b": {"x": b, "y": a, "z": 1}, "c": 5, "only": 1})
    zeros = torch.zeros(LARGE)
    here = {"a": zeros.double(), "b": {"x": torch.zeros(2, 2), "w": zeros, "z": 2}, "c": 4, "new": 1}
    assert differences(here, to) == [
        "new: is not in the checkpoint",
        "only: is only in the checkpoint",
        f"a: float32 {LARGE} in the checkpoint, float64 {LARGE} here",
        "b.w: is not in the checkpoint",
        "b.y: is only in the checkpoint",
        "b.x: float32 3 in the checkpoint, float32 2x2 here",
    ]
    assert differences({"a": 5, "b": {"x": b, "y": zeros, "z": 2}, "c": zeros, "only": 2}, to) == [
        f"a: float32 {LARGE} in the checkpoint, a plain value here",
        f"c: a plain value in the checkpoint, float32 {LARGE} here",
    ]


def test_a_model_of_another_size_and_an_optimizer_of_other_groups(to):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    later(to, {"model": model, "optimizer": optimizer})
    other = model_of(wide=32)
    found = differences_of_objects(other, torch.optim.AdamW(other.parameters()), to)
    assert found == ["model.0.weight: float32 96x64 in the checkpoint, float32 96x32 here"]
    same = model_of(1)
    two = torch.optim.AdamW([{"params": same[0].parameters()}, {"params": same[1:].parameters()}])
    found = differences_of_objects(same, two, to)
    assert found == ["optimizer: groups of [6] parameters in the checkpoint, of [2, 4] here"]


def differences_of_objects(model, optimizer, to):
    before = bits(dict(model.state_dict()))
    with pytest.raises(StateError, match="does not match the state of this script") as caught:
        load({"model": model, "optimizer": optimizer}, source=to)
    assert bits(dict(model.state_dict())) == before
    return str(caught.value).split("\n  ")[1:]


def test_many_differences_are_cut_short(to):
    later(to, {"w": {str(i): torch.zeros(2) for i in range(50)}})
    listed = differences({"w": {}}, to)
    assert [len(listed), listed[-1]] == [21, "and 30 more"]


def test_an_object_that_refuses_its_state_is_named(to):
    class Picky:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise ValueError("not with me")

    later(to, {"picky": Picky()})
    with pytest.raises(StateError, match=r"picky cannot load its state from .*step-5: not with me"):
        load({"picky": Picky()}, source=to)


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Thing(), r"state\.a\.1: a Thing is neither a tensor nor a plain value"),
        (torch.eye(3).to_sparse(), r"state\.a\.1: a torch.sparse_coo"),
        (torch.empty(5, device="meta"), r"state\.a\.1: a .* on meta cannot be saved"),
        ({(1, 2): 3}, r"state\.a\.1: the key \(1, 2\)"),
        ({2**70: 3}, r"state\.a\.1: the key 1180591620717411303424 has more than 64 bits"),
        ("\ud800", r"state\.a\.1: .* cannot be saved"),
        (np.zeros(3), r"state\.a\.1: a ndarray"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_and_the_next_save_works(to, value, why):
    with pytest.raises(UsageError, match=why):
        save({"state": {"a": [1, value]}}, 5, to=to)
    later(to, {"state": 1}, 6)
    assert Archive(to).steps() == [6]


def test_a_name_that_would_come_back_as_another_is_refused(to):
    with pytest.raises(UsageError, match="the name 1 in the state is not a string: use '1'"):
        save({1: torch.nn.Linear(2, 2)}, 5, to=to)
    assert Archive(to).steps() == []


def test_two_tensors_of_one_path_are_refused(to):
    with pytest.raises(UsageError, match=r"two tensors of the state have the same path w\.a\.b"):
        save({"w": {"a": {"b": torch.zeros(LARGE)}, "a.b": torch.ones(LARGE)}}, 5, to=to)


# ---------------------------------------------------------------- tiers that fail


def test_a_damaged_newest_one_is_passed_over_and_named(to, caplog):
    for number in (5, 10, 15):
        later(f"{to},keep=9", {"w": torch.full((LARGE,), float(number))}, number)
    archive = Archive(to)
    flip(archive.tier, archive.manifest(15).shards[0].blob.name, 77)
    archive.tier.remove(archive.manifest(10).shards[0].blob.name)
    target = {"w": torch.zeros(LARGE)}
    assert load(target, source=to) == 5
    assert target["w"].tolist() == [5.0] * LARGE
    said = caplog.text
    assert "skipped a checkpoint: " in said
    assert "step-15" in said
    assert "bytes 0 to" in said
    assert "step-10" in said
    assert "does not exist" in said


def test_nothing_whole_is_an_error_and_not_a_fresh_start(to):
    later(to, {"w": torch.zeros(LARGE)})
    archive = Archive(to)
    flip(archive.tier, archive.manifest(5).shards[0].head.name, 7)
    with pytest.raises(StateError, match=r"no checkpoint could be loaded: .*head\.safetensors is damaged"):
        load({"w": torch.zeros(LARGE)}, source=to)


def refuse(monkeypatch, number):
    """os.write fails; returns what makes it work again."""

    def write(fd, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", write)


def test_a_full_disk_is_said_once_and_stops_nothing(to, monkeypatch, caplog):
    state = {"w": torch.ones(LARGE)}
    later(to, state, 5)
    real = os.write
    refuse(monkeypatch, errno.ENOSPC)
    for number in (6, 7, 8):
        later(to, state, number)
    monkeypatch.setattr(os, "write", real)
    said = caplog.text
    assert said.count("\n") == 1
    assert f"step 6 was not saved in {to}: rank 0: the disk tier" in said
    assert "the disk is full: free some space" in said
    assert Archive(to).verify(5).step == 5


def test_after_a_full_disk_saves_work_and_the_next_time_is_said_again(to, monkeypatch, caplog):
    state = {"w": torch.ones(LARGE)}
    real = os.write
    for number in (5, 6, 7):
        if number % 2:
            refuse(monkeypatch, errno.ENOSPC)
        else:
            monkeypatch.setattr(os, "write", real)
        later(to, state, number)
    said = caplog.text
    assert [said.count("disk is full"), Archive(to).steps()] == [2, [6]]
    monkeypatch.setattr(os, "write", real)


def test_a_failing_save_never_leaves_what_looks_like_a_checkpoint(to, monkeypatch):
    real, written = os.write, []

    def write(fd, data):
        written.append(len(data))
        if len(written) == 2:  # the blob is there, its head is not
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    later(to, {"w": torch.ones(LARGE)})
    monkeypatch.setattr(os, "write", real)
    assert Archive(to).steps() == []
    later(to, {"w": torch.ones(LARGE)}, 6)
    assert Archive(to).verify(6).step == 6


def test_a_library_that_fails_in_an_unforeseen_way_is_said_and_the_next_save_works(to, monkeypatch, caplog):
    real = Archive.save_shard

    def broken(*args, **kwargs):
        raise LookupError("a bug")

    monkeypatch.setattr(Archive, "save_shard", broken)
    later(to, {"w": torch.ones(LARGE)}, 5)
    monkeypatch.setattr(Archive, "save_shard", real)
    later(to, {"w": torch.ones(LARGE)}, 6)
    assert "step 5 was not saved" in caplog.text
    assert Archive(to).steps() == [6]


def test_a_place_that_cannot_be_is_said_at_the_first_save(tmp_path, caplog, monkeypatch):
    state = {"w": torch.ones(3)}
    with pytest.raises(
        UsageError, match="no destination for the checkpoint: start the script with `holdfast run`"
    ):
        save(state, 5)
    with pytest.raises(UsageError, match="ftp is not a known kind of tier; use a folder"):
        save(state, 5, to="ftp://there/x")
    with pytest.raises(UsageError, match="'often=3' is not a known option"):
        save(state, 5, to=f"{tmp_path},often=3")
    (tmp_path / "file").write_text("")
    later(str(tmp_path / "file"), state)
    assert "there is a file where a folder should be: choose another folder" in caplog.text
    with pytest.raises(StateError, match="choose another folder"):
        load(state, source=str(tmp_path / "file"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_said(tmp_path, caplog):
    tmp_path.chmod(0o500)
    later(str(tmp_path / "saved"), {"w": torch.ones(3)})
    tmp_path.chmod(0o700)
    assert "no permission: choose a folder that belongs to you" in caplog.text


def test_no_memory_skips_a_snapshot_and_says_so(to, monkeypatch, caplog):
    later(to, {"w": torch.ones(LARGE)}, 5)
    place = api.backend_for(to)
    place._pool.budget_bytes = 4096
    assert save({"w": torch.ones(LARGE * 10)}, 6, to=to) is False
    flush()
    said = caplog.text
    assert "no snapshot of step 6" in said
    assert "does not fit" in said
    place._pool.budget_bytes = 1 << 30
    later(to, {"w": torch.ones(LARGE * 10)}, 7)
    assert Archive(to).steps() == [5, 7]


def test_memory_that_went_bad_before_it_was_stored_replaces_nothing(to, monkeypatch, caplog):
    state = {"w": torch.ones(LARGE)}
    later(f"{to},keep=1", state, 5)
    real = backends.SlotPool.received

    def received(self, slot, sealed):
        real(self, slot, sealed)
        with slot.blob as blob:
            blob[100] ^= 1

    monkeypatch.setattr(backends.SlotPool, "received", received)
    later(f"{to},keep=1", state, 6)
    assert "changed in memory" in caplog.text
    assert Archive(to).verify(5).step == 5
    assert Archive(to).steps() == [5]


# ---------------------------------------------------------------- how often, and what is kept


def test_steps_and_retention(to):
    for number in range(1, 21):
        later(f"{to},every=2,keep=2,keep-every=8", {"w": torch.ones(LARGE)}, number)
    assert Archive(to).steps() == [8, 16, 18, 20]


def test_times(to, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(backends.time, "monotonic", lambda: now[0])
    for number in range(1, 10):
        now[0] += 4
        later(f"{to},every=10s,keep=9", {"w": torch.ones(LARGE)}, number)
    assert Archive(to).steps() == [4, 7]  # counted from the first save


def test_what_ended_processes_left_in_memory_is_given_back(to, memory):
    def child():
        os.environ["HOLDFAST_MEMORY"] = str(memory)
        save({"w": torch.ones(LARGE)}, 5, to=to)
        flush()
        os._exit(0)

    pid = os.fork()
    if not pid:
        child()
    os.waitpid(pid, 0)
    assert len(list(memory.rglob("*.slot"))) == 1
    later(to, {"w": torch.ones(LARGE)}, 6)
    assert len(list(memory.rglob("*.slot"))) == 1
    assert len(list(memory.rglob("owner.lock"))) == 1


def save_and_end(to):
    save({"w": torch.ones(LARGE)}, 5, to=to)


def test_a_process_of_multiprocessing_ends_when_its_saves_are_done(to, memory):
    """Such processes end without atexit."""
    child = multiprocessing.get_context("fork").Process(target=save_and_end, args=(to,))
    child.start()
    child.join(60)
    assert [child.exitcode, Archive(to).steps()] == [0, [5]]
    assert not list(memory.rglob("*"))


def test_a_forked_child_does_not_give_its_parents_memory_back(to, memory):
    later(to, {"w": torch.ones(LARGE)}, 5)
    pid = os.fork()
    if not pid:
        for place in api._backends.values():
            place.close()
        os._exit(0)
    os.waitpid(pid, 0)
    later(to, {"w": torch.ones(LARGE)}, 6)
    assert Archive(to).steps() == [5, 6]


# ---------------------------------------------------------------- beside the next step


def test_an_optimizer_waits_for_a_copy_and_saves_what_was_before(to, monkeypatch):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    right = bits(dict(model.state_dict())), bits(optimizer.state_dict())
    real = api.copy_into
    go = threading.Event()
    copied = []

    def slowly(blob, tensors, ready):
        assert go.wait(30)
        real(blob, tensors, ready)
        copied.append(True)

    monkeypatch.setattr(api, "copy_into", slowly)
    assert save({"model": model, "optimizer": optimizer}, 5, to=to, overlap=True)
    model.eval()
    model(torch.randn(4, 64)).sum().backward()
    assert copied == []
    threading.Timer(0.05, go.set).start()
    optimizer.step()
    assert copied == [True]
    flush()
    fresh = model_of(1)
    other = torch.optim.AdamW(fresh.parameters())
    load({"model": fresh, "optimizer": other}, source=to)
    assert (bits(dict(fresh.state_dict())), bits(other.state_dict())) == right


def test_a_copy_beside_a_step_that_fails_is_said(to, monkeypatch, caplog):
    def broken(row, tensors, ready):
        raise RuntimeError("no such device")

    real = api.copy_into
    monkeypatch.setattr(api, "copy_into", broken)
    save({"w": torch.ones(LARGE)}, 5, to=to, overlap=True)
    flush()
    monkeypatch.setattr(api, "copy_into", real)
    assert "no snapshot of step 5: RuntimeError('no such device')" in caplog.text
    later(to, {"w": torch.ones(LARGE)}, 6)
    assert Archive(to).steps() == [6]


# ---------------------------------------------------------------- several ranks

ROWS = 1500


def grid(world):
    """A mesh of two dimensions where that can be."""
    return init_device_mesh(
        "cpu", (2, world // 2) if world % 2 == 0 else (1, world), mesh_dim_names=("a", "b")
    )


def sharded_state(value, world):
    """The whole tensors follow from `value`."""
    torch.manual_seed(value)
    whole = torch.randn(ROWS + 1, 6)
    line, square = init_device_mesh("cpu", (world,)), grid(world)
    rank = dist.get_rank()
    return {
        "rows": distribute_tensor(whole.clone(), line, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), line, [Shard(1)]),
        "replicas": distribute_tensor(whole.clone(), line, [Replicate()]),
        "grid": distribute_tensor(whole.clone(), square, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(whole.clone(), square, [Replicate(), Shard(0)]),
        "few": distribute_tensor(whole[:1].clone(), line, [Shard(0)]),
        "small": distribute_tensor(whole[0, :4].clone(), line, [Replicate()]),
        "own": torch.full((LARGE,), float(value * 100 + rank)),
        "own shape": torch.full((LARGE + rank,), float(value)),
        "own number": value * 100 + rank,
    }


def wholes(state):
    return {k: v.full_tensor() for k, v in state.items() if isinstance(v, DTensor)}


def save_sharded(to):
    world = dist.get_world_size()
    for value in (5, 6):
        save(sharded_state(value, world), value, to=to)
    flush()
    return Archive(to).steps()  # also rank 1 sees the manifest now


def load_sharded(to):
    world, rank = dist.get_world_size(), dist.get_rank()
    state = sharded_state(9, world)
    if world != 2:
        del state["own shape"]
        state["own shape"] = torch.zeros(LARGE + min(rank, rank % 2))
    before = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    got = load(state, source=to)
    right = wholes(sharded_state(6, world))
    there = wholes(state)
    return {
        "step": got,
        "equal": all(torch.equal(there[k], right[k]) for k in right),
        "same": all(state[k] is v for k, v in before.items()),
        "own": [state["own"][0].item(), state["own number"], len(state["own shape"]) - LARGE],
    }


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    to = str(tmp_path_factory.mktemp("two") / "saved")
    assert together(save_sharded, 2, to) == [[5, 6], [5, 6]]
    return to


@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2)), 3])
def test_what_two_ranks_saved_loads_on_any_number(saved_by_two, world):
    for rank, got in enumerate(together(load_sharded, world, saved_by_two)):
        owner = rank % 2
        assert [got["step"], got["equal"], got["same"]] == [6, True, True]
        assert got["own"] == [600.0 + owner, 600 + owner, owner]


def load_with_damage(to, blob_of_rank):
    """One rank's shard of the newest one is damaged: no rank may take it."""
    rank = dist.get_rank()
    state = {"w": torch.zeros(LARGE)}
    for value in (5, 6):
        save({"w": torch.full((LARGE,), value + rank / 10)}, value, to=to)
    flush()
    dist.barrier()
    if rank == 0:
        archive = Archive(to)
        flip(archive.tier, archive.manifest(6).shards[blob_of_rank].blob.name, 9)
    dist.barrier()
    return {"step": load(state, source=to), "w": state["w"][0].item()}


def test_ranks_agree_on_an_older_one_when_one_of_them_cannot_read_the_newest(tmp_path):
    got = together(load_with_damage, 2, str(tmp_path / "saved"), 1)
    assert [(g["step"], round(g["w"], 3)) for g in got] == [(5, 5.0), (5, 5.1)]
    assert "skipped a checkpoint" in got[1]["said"]


def load_another_state(to):
    rank = dist.get_rank()
    save({"w": torch.zeros(LARGE)}, 5, to=to)
    try:
        load({"w": torch.zeros(LARGE + rank)}, source=to)
    except StateError as error:
        return {"why": str(error)}
    return {"why": ""}


def test_a_rank_with_another_state_stops_all(tmp_path):
    first, second = together(load_another_state, 2, str(tmp_path / "saved"))
    assert "rank 1: " in first["why"]
    assert "in the checkpoint" in first["why"]
    assert f"float32 {LARGE + 1} here" in second["why"]


def save_where_one_fails(to):
    """Rank 1 has no memory for step 6, and its disk is full at step 7. Nobody waits for ever."""
    rank = dist.get_rank()
    state = {"w": torch.full((LARGE,), float(rank))}
    place = api.backend_for(to)
    kept = []
    for number in (5, 6, 7, 8):
        place._pool.budget_bytes = 0 if (rank, number) == (1, 6) else 1 << 30
        real = os.write
        if (rank, number) == (1, 7):

            def full(fd, data):
                raise OSError(errno.ENOSPC, "No space left on device")

            os.write = full
        if (rank, number) == (1, 6):  # so that it must allocate
            state = {"w": torch.full((LARGE * 3,), float(rank))}
        kept.append(save(state, number, to=to))
        flush()
        os.write = real
    return {"kept": kept, "steps": Archive(to).steps()}


def test_a_rank_that_cannot_save_does_not_hold_up_the_others(tmp_path):
    first, second = together(save_where_one_fails, 2, f"{tmp_path / 'saved'}")
    assert [first["kept"], second["kept"]] == [[True] * 4, [True, False, True, True]]
    assert first["steps"] == second["steps"] == [5, 8]
    assert "step 6 was not saved in" in first["said"]
    assert "rank 1: a snapshot of" in first["said"]


def save_a_step_again(to):
    rank = dist.get_rank()
    for value in (1.0, 2.0):
        save({"w": torch.full((LARGE,), value + rank / 10)}, 5, to=to)
        flush()
    state = {"w": torch.zeros(LARGE)}
    load(state, source=to)
    return [round(state["w"][0].item(), 3), Archive(to).verify(5).world]


def test_a_step_that_is_saved_again_is_of_one_piece(tmp_path):
    assert together(save_a_step_again, 2, str(tmp_path / "saved")) == [[2.0, 2], [2.1, 2]]


def save_by_time(to):
    """Rank 1's clock says otherwise: rank 0's counts. Saves follow each other closely, each rank at its own pace."""
    if dist.get_rank():
        backends.time.monotonic = lambda: 0.0
    for number in range(1, 30):
        save({"w": torch.full((LARGE,), float(number))}, number, to=to)
    flush()
    partial = DTensor.from_local(torch.ones(LARGE), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(
        UsageError, match="w: the local part of a DTensor placed as"
    ):  # a sum that is still to be reduced
        save({"w": partial}, 30, to=to)
    return {"steps": Archive(to.partition(",")[0]).steps()}


def test_of_time_rank_0_is_the_judge(tmp_path):
    first, second = together(save_by_time, 2, f"{tmp_path / 'saved'},every=0.0001s,keep=99")
    assert first["steps"] == second["steps"]
    assert first["steps"]


def save_before_and_after_the_group(to):
    """A script that loads first and makes its process group later."""
    dist.barrier()
    groups = dist.distributed_c10d._world.default_pg, dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    first = load({"w": torch.zeros(LARGE)}, source=to)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=groups[1], world_size=2)
    save({"w": torch.full((LARGE,), float(groups[1]))}, 5, to=to)
    state = {"w": torch.zeros(LARGE)}
    return [first, load(state, source=to), state["w"][0].item()]


def test_a_script_that_loads_before_it_makes_its_process_group(tmp_path):
    assert together(save_before_and_after_the_group, 2, str(tmp_path / "saved")) == [
        [None, 5, 0.0],
        [None, 5, 1.0],
    ]


class Heard:
    """A link to an agent that nobody answers on."""

    def __init__(self):
        self.start, self.token, self.said = SimpleNamespace(env={"HOLDFAST_GENERATION": "3"}), "t", []

    def send(self, message):
        self.said.append(message)


def test_under_an_agent_the_coordinator_is_told_how_far_a_load_is(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(transfer_progress.time, "monotonic", lambda: now[0])
    link = Heard()
    with backends.AgentBackend(link).loading("step 5 in the memory of node1", 3_000_000) as seen:
        now[0] += 2.5
        seen(1_000_000)
    assert link.said == [m.Restoring(3, 1_000_000, 3_000_000), m.Restoring(3, 3_000_000, 3_000_000)]
    assert "loading step 5 in the memory of node1: 1.00 MB of 3.00 MB" in capsys.readouterr().err
