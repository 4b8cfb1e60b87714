"""On a machine with a GPU: the copies themselves. Elsewhere `test_staging` and `test_gpu_transfer` try their logic."""

import mmap

import pytest
import torch
from test_staging import Some, row_of

from holdfast.checkpoint.pages import PAGE, SlotMaps
from holdfast.tensors import staging
from holdfast.train import gpu_transfer, snapshots, state_image

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class OnGpu(Some):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tensors = [t.cuda() for t in self.tensors]


@pytest.fixture
def row() -> bytes:
    return row_of(Some(0))


def test_pieces_are_what_the_gpu_holds(row):
    image = state_image.capture({"some": OnGpu(0)}, 1)
    assert b"".join(bytes(p) for p in image.pieces(0, len(row))) == row
    assert b"".join(bytes(p) for p in image.pieces(5, 2817)) == row[5:2817]


def test_a_copy_waits_for_what_was_queued_before():
    thing = OnGpu(0)
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        big = big @ big / 4096
    thing.tensors[1].fill_(7.0)
    image = state_image.capture({"some": thing}, 1)
    thing.tensors[0] = thing.tensors[0] + 1  # a new tensor: the image has the old one
    low = image.index.tensors[1].offset
    got = b"".join(bytes(p) for p in image.pieces(low, low + 400))
    assert got == torch.full((100,), 7.0).numpy().tobytes()


def test_what_is_filled_is_on_the_gpu(row):
    target = OnGpu(1)
    image = state_image.capture({"some": target}, 1)
    with image.filling(0, len(row)) as pieces:
        at = 0
        for piece in pieces:
            piece[:] = row[at : at + len(piece)]
            at += len(piece)
    assert b"".join(t.cpu().numpy().tobytes() for t in target.tensors) == row


def test_a_slot_that_the_driver_knows_holds_the_state(tmp_path, row):
    image = state_image.capture({"some": OnGpu(0)}, 1)
    path = tmp_path / "slot"
    path.write_bytes(bytes(PAGE + -(-len(row) // mmap.PAGESIZE) * mmap.PAGESIZE))
    pinning = staging.Pinning(torch.device("cuda", 0))
    maps = SlotMaps(pinning)
    with maps.blob(str(path), len(row)) as slot:
        assert pinning.covers(slot)
        snapshots.copy_into(slot, image, pinned=True)
        assert bytes(slot) == row
    maps.forget(str(path))


def test_a_gpu_and_a_processor_find_the_same_fingerprint():
    bits = torch.randint(0, 256, (3 * (1 << 20) + 5,), dtype=torch.uint8)
    assert gpu_transfer.fingerprint(bits.cuda()).tolist() == gpu_transfer.fingerprint(bits).tolist()


def test_a_number_is_that_of_its_time():
    value = torch.tensor(3.0, device="cuda")
    read = staging.number(value)
    value.add_(1.0)
    assert read() == 3.0
