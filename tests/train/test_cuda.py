"""On a machine with a GPU: the copies themselves. Elsewhere `test_staging` and `test_gpu_transfer` try their logic."""

import mmap
import tempfile

import pytest
import torch
from test_staging import Some, row_of

from holdfast.checkpoint.memory import PAGE, SlotMaps
from holdfast.tensors import staging
from holdfast.train import gpu_transfer, state_image

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


@pytest.fixture
def slot_file(row):
    """Where agents have their slots: of a file on a disk the driver refuses to know the pages."""
    with tempfile.NamedTemporaryFile(prefix="test-slot-", dir="/dev/shm") as file:
        file.write(bytes(PAGE + -(-len(row) // mmap.PAGESIZE) * mmap.PAGESIZE))
        file.flush()
        yield file.name


def test_a_slot_that_the_driver_knows_holds_the_state(slot_file, row):
    image = state_image.capture({"some": OnGpu(0)}, 1)
    pinning = staging.Pinning(torch.device("cuda", 0))
    maps = SlotMaps(pinning)
    with maps.blob(slot_file, len(row)) as slot:
        assert pinning.covers(slot)
        staging.copy_into(slot, image.parts(0, len(slot)), image.ready, pinned=True)
        assert bytes(slot) == row
    maps.forget(slot_file)


def test_a_refusal_by_the_driver_is_not_the_next_kernels(slot_file, row):
    """CUDA's runtime keeps it, and reports it to whoever asks next on this thread."""
    pinning = staging.Pinning(torch.device("cuda", 0))
    maps, again = SlotMaps(pinning), staging.Pinning(torch.device("cuda", 0))
    with maps.blob(slot_file, len(row)) as slot:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
            pinning.mapped(memory)
            again.mapped(memory)  # the driver knows it already
            with memoryview(memory) as view:
                assert not again.covers(view)
            assert torch.ones(8, device="cuda").sum().item() == 8
            pinning.unmapped(memory)
        assert pinning.covers(slot)
    maps.forget(slot_file)


def test_a_gpu_and_a_processor_find_the_same_fingerprint():
    bits = torch.randint(0, 256, (3 * (1 << 20) + 5,), dtype=torch.uint8)
    assert gpu_transfer.fingerprint(bits.cuda()).tolist() == gpu_transfer.fingerprint(bits).tolist()


def test_a_number_is_that_of_its_time():
    value = torch.tensor(3.0, device="cuda")
    read = staging.number(value)
    value.add_(1.0)
    assert read() == 3.0
