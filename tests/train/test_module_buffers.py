"""Buffers come back as they were, and those that do not change are not copied again."""

import pytest
import torch

from holdfast.train.held_state import SMALL_BYTES, ModuleBuffers

LARGE = SMALL_BYTES // 4 + 1


@pytest.mark.parametrize("size", [0, 1, 5, LARGE])
def test_a_dropped_step_leaves_no_trace(size):
    buffer = torch.arange(size, dtype=torch.float32)
    before = buffer.clone()
    buffers = ModuleBuffers([buffer])
    for _ in range(3):
        buffers.keep()
        buffer.mul_(2.0).add_(1.0)
        buffers.put_back()
        assert torch.equal(buffer, before)
    buffers.keep()
    buffer.add_(1.0)  # this step counts
    buffers.keep()
    buffer.add_(1.0)
    buffers.put_back()
    assert torch.equal(buffer, before + 1.0)


def test_batch_norm_whose_changes_torch_does_not_count():
    norm = torch.nn.BatchNorm1d(LARGE)
    buffers = ModuleBuffers(norm.buffers())
    before = [b.clone() for b in norm.buffers()]
    for _ in range(3):
        buffers.keep()
        norm(torch.randn(2, LARGE))
        assert not torch.equal(norm.running_mean, before[0])
        buffers.put_back()
        assert all(map(torch.equal, norm.buffers(), before))


def test_a_large_buffer_that_stays_is_copied_once():
    buffer = torch.randn(LARGE)
    buffers = ModuleBuffers([buffer])
    first = buffers.copy_of(buffer)
    for _ in range(3):
        buffers.keep()
        assert buffers.copy_of(buffer) is first
    buffer.zero_()
    again = buffers.copy_of(buffer)
    assert again is not first
    assert first.any()  # whoever reads the older copy still reads what it was
    assert not again.any()


def test_what_was_filled_from_outside_is_copied_again():
    buffer = torch.zeros(LARGE)
    buffers = ModuleBuffers([buffer])
    buffers.keep()
    memoryview(buffer.numpy())[7] = 3.0  # neither counted nor among the samples
    buffers.forget()
    buffers.keep()
    buffer.zero_()
    buffers.put_back()
    assert buffer[7] == 3.0
