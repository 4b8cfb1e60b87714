"""Checkpoints of sharded models, made without a second process: one shard's objects after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import seal, sums_of_buffers
from holdfast.train import state_image

STEP = 5


def box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where in the complete tensor a piece lies; without a start it is the complete one."""
    return tuple(slice(a, a + n) for a, n in zip(start or (0,) * len(shape), shape, strict=True))


def gather(objects: dict[str, Any], into: dict[str, torch.Tensor]) -> None:
    """Puts one shard's pieces into complete tensors. What no shard has stays NaN."""
    image = state_image.capture(objects, 0)
    for spec, tensor in zip(image.index.tensors, image.tensors, strict=True):
        complete = into.setdefault(spec.path, torch.full(spec.global_shape or spec.shape, torch.nan))
        complete[box(spec.start, spec.shape)] = tensor


def save(url: str, shards: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A checkpoint of step STEP of these objects, in the order of the shards. Returns the complete tensors in it."""
    archive, saved, content = Archive(url), [], {}
    for number, objects in enumerate(shards):
        gather(objects, content)
        image = state_image.capture(objects, STEP)
        total = image.index.nbytes
        sums = sums_of_buffers(image.pieces(0, total))
        saved.append(archive.save_shard(STEP, number, seal(image.index, sums), image.pieces(0, total)))
    archive.commit(STEP, saved)
    assert not any(t.isnan().any() for t in content.values())
    return content


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same tensors under the same names, bit by bit."""
    assert found.keys() == wanted.keys()
    for path, tensor in wanted.items():
        assert torch.equal(found[path], tensor), path
