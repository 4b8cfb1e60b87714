"""What becomes of module buffers that a forward pass changes, such as running statistics or the loads of experts.

Each worker's forward passes see other samples, so each would end a step with another value. A rule says what the commit makes
of them. Under "sum" and "mean" every micro-batch starts from the value that the last commit left, and what each of them
changed is added up over the micro-batches of the whole global batch. So the value after a step does not depend on how many
workers there are, nor on which of them had which micro-batch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from holdfast.errors import UsageError
from holdfast.train.generation_group import Group
from holdfast.train.state_image import BufferPlace, Protected, persistent_buffers

BufferRule = Literal["restore", "sum", "mean", "own"]
Declared = Sequence[tuple[BufferRule, tuple[str, ...]]]
"""Rules in the order of the script's calls, each with the patterns of the paths that it is for; none: all."""


@dataclass(frozen=True)
class _Ruled:
    at: BufferPlace
    rule: BufferRule
    kept: list[torch.Tensor] = field(default_factory=list)
    """What the newest commit left: one tensor, or none while that is not known."""

    @property
    def now(self) -> torch.Tensor:
        # Asked for each time: a forward pass may put another tensor into its place.
        return self.at.tensor


class BufferRules:
    """The buffers that have a rule, and what a step has made of them so far."""

    def __init__(self, objects: Protected, declared: Declared, *, sharded: bool, exact: bool) -> None:
        """exact: the sum must not depend on how the micro-batches are spread over the workers, to the last bit.

        Raises:
            UsageError: a pattern without a buffer, or a buffer that cannot be summed.
        """
        found = [_Ruled(at, rule) for at, rule in _rules(objects, declared)]
        self.own = tuple(r.at.path for r in found if r.rule == "own")
        self.paths = frozenset(r.at.path for r in found)
        self._put = [r for r in found if r.rule != "own"]
        self._summed = [r for r in found if r.rule in ("sum", "mean")]
        for ruled in self._summed:
            _check_summed(ruled, sharded)
        self._exact = exact
        self._known = False
        self._rows: torch.Tensor | None = None
        self._works: list[Any] = []

    def begin(self, micro_batches: int) -> None:
        """A step begins. micro_batches: of the global batch."""
        self.put_back()
        if not self._known:
            self.keep()
        if self._summed:
            # A new one for each step: a collective of a step that broke may still hold the older one.
            width = sum(r.now.numel() for r in self._summed)
            rows = micro_batches if self._exact else 1
            self._rows = torch.zeros((rows, width), dtype=torch.float64, device=self._summed[0].now.device)
        self._micro_batches = micro_batches

    def after_micro(self, micro: int) -> None:
        """Forward and backward pass of micro-batch `micro` of the global batch are done: activation checkpointing may run
        the forward pass again within the backward pass."""
        if not self._summed:
            return
        assert self._rows is not None
        changes = []
        for ruled in self._summed:
            now, was = ruled.now.detach().double().flatten(), ruled.kept[0].double().flatten()
            # An infinity that stays is no change; its difference would be NaN.
            changes.append(torch.where(now == was, 0.0, now - was))
        self._rows[micro if self._exact else 0] += torch.cat(changes)
        self.put_back()

    def reduce(self, group: Group) -> None:
        """Sums over all replicas; every member calls it at the same place of the step.

        Raises:
            CollectiveFailed: the generation broke.
        """
        # Where rows of single micro-batches are summed, all others add zeros to them, which changes no bit.
        if self._summed and group.size > 1:
            assert self._rows is not None
            self._works.append(group.allreduce(self._rows))
            group.wait(self._works[0])
            self._works.clear()

    def drain(self, group: Group) -> None:
        """After a break: returns when no collective writes into the sums."""
        works, self._works = self._works, []
        for work in works:
            group.drain(work)

    def commit(self, skipped: bool) -> None:
        """Part of a step's update, before anything of the script's: the buffers become what their rules say. skipped: they
        stay what they were before the step."""
        self.put_back()
        if not self._summed or skipped:
            return
        assert self._rows is not None
        # Row after row, in the order of the micro-batches: torch's own sum may choose another order for another
        # shape of its input, and here every worker count must give the same bits.
        total = self._rows[0].clone()
        for row in self._rows[1:]:
            total += row
        at = 0
        with torch.no_grad():
            for ruled in self._summed:
                kept = ruled.kept[0]
                change = total[at : at + kept.numel()].reshape(kept.shape)
                at += kept.numel()
                if ruled.rule == "mean":
                    change = change / self._micro_batches
                value = kept.double() + change
                ruled.now.copy_(value if kept.is_floating_point() else value.round())

    def keep(self) -> None:
        """The buffers are what a commit left."""
        for ruled in self._put:
            ruled.kept[:] = [ruled.now.detach().clone()]
        self._known = True

    def put_back(self) -> None:
        """Undoes what forward passes have changed since the commit, in a step or between two."""
        if self._known:
            with torch.no_grad():
                for ruled in self._put:
                    ruled.now.copy_(ruled.kept[0])

    def forget(self) -> None:
        """The buffers were filled from outside."""
        self._known = False


def check_rule(rule: str) -> None:
    """Raises UsageError for a rule that there is not."""
    if rule not in get_args(BufferRule):
        raise UsageError(f"run.buffers({rule!r}): choose one of {', '.join(map(repr, get_args(BufferRule)))}")


def _rules(objects: Protected, declared: Declared) -> list[tuple[BufferPlace, BufferRule]]:
    """Of every buffer that has one: the last declaration that names it counts."""
    there = {at.path: at for at in persistent_buffers(objects)}
    found: dict[str, tuple[BufferPlace, BufferRule]] = {}
    for rule, patterns in declared:
        for pattern in patterns or ("*",):
            named = fnmatch.filter(there, pattern)
            if patterns and not named:
                shown = ", ".join(list(there)[:8]) or "none"
                raise UsageError(
                    f"run.buffers({rule!r}, {pattern!r}): no protected module has a buffer of this name that its "
                    f"state_dict holds; there are: {shown}{', …' if len(there) > 8 else ''}"
                )
            found |= {path: (there[path], rule) for path in named}
    return list(found.values())


def _check_summed(ruled: _Ruled, sharded: bool) -> None:
    if sharded:
        raise UsageError(
            f"run.buffers({ruled.rule!r}): {ruled.at.path} would be summed over the replicas, but not over the shards of "
            'a replica; after run.mesh() choose "restore" or "own"'
        )
    if ruled.now.dtype is torch.bool or ruled.now.is_complex():
        raise UsageError(
            f"run.buffers({ruled.rule!r}): {ruled.at.path} is of {ruled.now.dtype}, which is not summed; give it "
            f'a rule of its own: run.buffers("restore", "{ruled.at.path}")'
        )
