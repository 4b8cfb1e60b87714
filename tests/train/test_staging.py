"""Copies between a GPU and the host, with host memory in the GPU's place."""

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from holdfast.checkpoint.memory import PAGE, SlotMaps
from holdfast.tensors import staging
from holdfast.train import state_image


@pytest.fixture
def far(monkeypatch):
    """As if CPU tensors were a GPU's."""
    monkeypatch.setattr(staging, "FAR", {"cpu"})
    monkeypatch.setattr(staging, "STAGE_BYTES", 1000)


class Some:
    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.tensors = [torch.randn(n, generator=rng) for n in (3, 700, 0, 1, 251, 5000)]

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, tree):
        self.tensors = tree["tensors"]


def row_of(thing: Some) -> bytes:
    return b"".join(t.numpy().tobytes() for t in thing.tensors)


def test_pieces_pass_through_two_buffers_in_their_order(far):
    image = state_image.capture({"some": Some(0)}, 1)
    assert not image.near
    row = row_of(Some(0))
    for low, high in [(0, len(row)), (5, 2817), (2811, 2812), (2900, len(row) - 3)]:
        places, got = set(), b""
        for piece in image.pieces(low, high):
            assert len(piece) <= 1000
            places.add(np.frombuffer(piece, np.uint8).ctypes.data)
            got += bytes(piece)
        assert got == row[low:high]
        assert len(places) <= 2


def test_a_piece_is_whole_until_the_next_is_asked_for(far):
    """The copy of the next one is under way meanwhile."""
    parts = [torch.full((1000,), i, dtype=torch.uint8) for i in range(9)]
    for number, piece in enumerate(staging.read(parts, {})):
        assert bytes(piece) == bytes([number]) * 1000


def test_what_is_filled_is_in_the_tensors_afterwards(far):
    source, target = Some(0), Some(1)
    image = state_image.targets({"some": target}, state_image.capture({"some": source}, 1).index)
    row = row_of(source)
    for low in range(0, len(row), 1500):
        with image.filling(low, min(low + 1500, len(row))) as pieces:
            for piece in pieces:
                piece[:] = row[low : low + len(piece)]
                low += len(piece)
    state_image.load({"some": target}, image)
    assert row_of(target) == row


@pytest.mark.parametrize("pinned", [True, False])
def test_a_snapshot_is_copied_whole(far, pinned):
    image = state_image.capture({"some": Some(3)}, 1)
    row = memoryview(bytearray(image.index.nbytes))
    staging.copy_into(row, image.parts(0, len(row)), image.ready, pinned)
    assert bytes(row) == row_of(Some(3))


def test_slots_are_made_known_to_the_driver_once_and_given_back(tmp_path, monkeypatch):
    calls = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda begin, size, flags: calls.append(("known", begin, size)) or refused.pop(0),
        cudaHostUnregister=lambda begin: calls.append(("gone", begin)),
    )
    refused = [0, 0, 1]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: staging.nullcontext())
    monkeypatch.setattr(staging, "_forget_refusal", lambda device: calls.append(("forgotten", 0, 0)))
    pinning = staging.Pinning(torch.device("cuda", 0))
    maps = SlotMaps(pinning)
    paths = [tmp_path / f"slot{i}" for i in range(3)]
    for path in paths:
        path.write_bytes(bytes(PAGE + 3 * mmap.PAGESIZE))
    with maps.blob(str(paths[0]), 5000) as row:
        assert pinning.covers(row)
    with maps.blob(str(paths[0]), 5000) as row:
        assert len(calls) == 1
    paths[0].unlink()
    with maps.blob(str(paths[1]), 5000) as row:
        assert [what for what, *_ in calls] == ["known", "known", "gone"]
        assert pinning.covers(row)
    assert not pinning.covers(memoryview(bytearray(100)))
    with maps.blob(str(paths[2]), 5000) as row:
        assert not pinning.covers(row)  # refused: the way through buffers
        assert calls[-1][0] == "forgotten"  # and not the next kernel's error
    paths[2].unlink()
    with maps.blob(str(paths[1]), 5000):
        assert [what for what, *_ in calls].count("gone") == 1


def test_what_a_script_saves_passes_through_the_buffers_too(far):
    tensors = [torch.arange(900.0), torch.arange(12.0).reshape(3, 4).t(), torch.empty(0)]
    row = bytearray(sum(t.numel() * 4 for t in tensors))
    staging.copy_into(memoryview(row), tensors, staging.now(tensors))
    assert bytes(row) == b"".join(t.contiguous().numpy().tobytes() for t in tensors)
