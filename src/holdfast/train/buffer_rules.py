"""What becomes of module buffers that a forward pass changes, such as running statistics or the loads of experts.

Each worker's forward passes see other samples, so each would end a step with another value. A rule says what the commit makes
of them. Under "sum" and "mean" every micro-batch starts from the value that the last commit left, and what each of them
changed is added up over the micro-batches of the whole global batch. So the value after a step does not depend on how many
workers there are, nor on which of them had which micro-batch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from holdfast.errors import UsageError
from holdfast.tensors.wrappers import is_wrapper
from holdfast.tensors.writable import is_expanded
from holdfast.train.advice import Advice
from holdfast.train.generation_group import Group
from holdfast.train.placements import is_spread
from holdfast.train.state_image import BufferPlace, Protected, persistent_buffers

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding

BufferRule = Literal["restore", "sum", "mean", "own"]
Declared = Sequence[tuple[BufferRule, tuple[str, ...]]]
"""Rules in the order of the script's calls, each with the patterns of the paths that it is for; none: all."""


@dataclass(frozen=True)
class _Ruled:
    at: BufferPlace
    rule: BufferRule
    kept: torch.Tensor
    """What the newest commit left."""

    @property
    def now(self) -> torch.Tensor:
        # Asked for each time: a forward pass may put another tensor into its place.
        return self.at.tensor


class BufferRules:
    """The buffers that have a rule, and what a step has made of them so far.

    Attributes:
        advice: what errors tell the script to write.
        own: paths of those that each worker keeps for itself.
        paths: of all that have a rule.
    """

    def __init__(
        self,
        objects: Protected,
        declared: Declared,
        *,
        sharded: bool,
        exact: bool,
        advice: Advice | None = None,
        alike: int = 1,
        parts: int = 1,
    ) -> None:
        """sharded: a replica has several workers. alike: so many of them compute the very same. parts: so many compute a
        part of each micro-batch. exact: the sum must not depend on how the micro-batches are spread over the
        workers, to the last bit.

        Raises:
            UsageError: a pattern without a buffer, or a buffer that cannot be summed.
        """
        self.advice = advice = advice or Advice()
        # Copied here, and not when a step begins: a script may evaluate before its first step. Those that come
        # later fetch the state without that, so all would not go on alike.
        declarations = _rules(objects, declared, advice)
        for at, rule in declarations:
            _check_plain(at, rule, advice)
        found = [_Ruled(at, rule, at.tensor.detach().clone()) for at, rule in declarations]
        self.own = tuple(r.at.path for r in found if r.rule == "own")
        self.paths = frozenset(r.at.path for r in found)
        self._put = [r for r in found if r.rule != "own"]
        self._summed = [r for r in found if r.rule in ("sum", "mean")]
        for ruled in self._summed:
            _check_summed(ruled, advice, alike)
        self._parts = parts
        # Workers of a replica hold a buffer whole, and those with another shard sum it in another group. A row for
        # each micro-batch makes the order of additions the same in all groups, so they get the same bits.
        self._exact = exact or sharded
        self._rows: torch.Tensor | None = None
        self._works: list[Any] = []
        self._lay_out()
        self.keep()

    def begin(self, micro_batches: int) -> None:
        """A step begins. micro_batches: of the global batch."""
        self.put_back()
        if self._summed:
            # A new one for each step: a collective of a step that broke may still hold the older one.
            width = sum(r.now.numel() for r in self._summed)
            rows = micro_batches if self._exact else 1
            # In float64, whatever the buffers are: the sum of many micro-batches in half precision would
            # depend on their number, and with it on the world size.
            self._rows = torch.zeros((rows, width), dtype=torch.float64, device=self._summed[0].now.device)
        self._micro_batches = micro_batches

    def after_micro(self, micro: int) -> None:
        """Forward and backward pass of micro-batch `micro` of the global batch are done: activation checkpointing may run
        the forward pass again within the backward pass."""
        if not self._summed:
            return
        assert self._rows is not None
        # All buffers at once: a network has hundreds of them, each of a few hundred numbers, so the calls cost
        # more than the sums.
        torch._foreach_copy_(self._flat_views, [r.now for r in self._summed])
        # An infinity that stays is no change; its difference would be NaN.
        changed = torch.where(self._flat == self._was, 0.0, self._flat - self._was)
        self._rows[micro if self._exact else 0] += changed
        self.put_back()

    def reduce_inside(self, sharding: Sharding) -> None:
        """Sums over the workers of a replica that have other micro-batches. It comes before anything that waits for another
        replica: a worker that fails there leaves the step, and the others of its replica would wait for it here.

        Raises:
            CollectiveFailed: the generation broke.
        """
        if self._summed:
            assert self._rows is not None
            sharding.sum_over_shards(self._rows)

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
        value = self._was + torch.where(self._is_mean, total / (self._micro_batches * self._parts), total)
        torch.where(self._is_whole, value.round(), value, out=self._flat)
        with torch.no_grad():
            torch._foreach_copy_([r.now for r in self._summed], self._flat_views)

    def keep(self) -> None:
        """The buffers are what a commit left, or what a transfer brought."""
        if self._put:
            torch._foreach_copy_([r.kept for r in self._put], [r.now.detach() for r in self._put])
        if self._summed:
            torch._foreach_copy_(_views(self._was, self._summed), [r.kept for r in self._summed])

    def put_back(self) -> None:
        """Undoes what forward passes have changed since the commit, in a step or between two."""
        if self._put:
            with torch.no_grad():
                torch._foreach_copy_([r.now for r in self._put], [r.kept for r in self._put])

    def _lay_out(self) -> None:
        """Makes the flat tensors in which all summed buffers lie one after the other, as they are now."""
        if not self._summed:
            return
        sizes = torch.tensor([r.now.numel() for r in self._summed])
        device = self._summed[0].now.device

        def each(is_it: Callable[[_Ruled], bool]) -> torch.Tensor:
            return torch.tensor([is_it(r) for r in self._summed]).repeat_interleave(sizes).to(device)

        self._is_mean = each(lambda ruled: ruled.rule == "mean")
        self._is_whole = each(lambda ruled: not ruled.now.is_floating_point())
        self._was = torch.zeros(int(sizes.sum()), dtype=torch.float64, device=device)
        self._flat = torch.zeros_like(self._was)
        self._flat_views = _views(self._flat, self._summed)


def _views(flat: torch.Tensor, buffers: Sequence[_Ruled]) -> list[torch.Tensor]:
    """The part of each buffer in a flat tensor, in its shape."""
    parts = torch.split(flat, [r.kept.numel() for r in buffers])
    return [part.view(r.kept.shape) for part, r in zip(parts, buffers, strict=True)]


def check_rule(rule: str, line: str) -> None:
    """Raises UsageError for a rule that there is not. line: where it was given."""
    if rule not in get_args(BufferRule):
        raise UsageError(f"{line}: choose one of {', '.join(map(repr, get_args(BufferRule)))}")


def _rules(objects: Protected, declared: Declared, advice: Advice) -> list[tuple[BufferPlace, BufferRule]]:
    """Of every buffer that has one: the last declaration that names it counts."""
    there = {at.path: at for at in persistent_buffers(objects)}
    found: dict[str, tuple[BufferPlace, BufferRule]] = {}
    for rule, patterns in declared:
        for pattern in patterns or ("*",):
            named = fnmatch.filter(there, pattern)
            if patterns and not named:
                shown = ", ".join(list(there)[:8]) or "none"
                raise UsageError(
                    f"{advice.buffer(rule, pattern)}: no protected module has a buffer of this name that its "
                    f"state_dict holds; there are: {shown}{', …' if len(there) > 8 else ''}"
                )
            found |= {path: (there[path], rule) for path in named}
    return list(found.values())


def _check_plain(at: BufferPlace, rule: BufferRule, advice: Advice) -> None:
    if is_wrapper(at.tensor):
        what = f"a {type(at.tensor).__name__} is made of other tensors"
    elif is_expanded(at.tensor):
        what = (
            f"it is an expanded tensor (strides {at.tensor.stride()}), which has fewer places than elements"
        )
    else:
        return
    raise UsageError(
        f"{advice.buffer(rule, at.path)}: {what}, and no rule can be kept for it; register a plain tensor (tensor.clone())"
    )


def _check_summed(ruled: _Ruled, advice: Advice, alike: int) -> None:
    path = ruled.at.path
    if is_spread(ruled.at.module._buffers[ruled.at.name], alike):
        raise UsageError(
            f"{advice.buffer(ruled.rule, path)}: it is a DTensor, and workers with different micro-batches hold different parts of "
            f"it, which are not summed; register it as a plain tensor, or give it a rule of its own: {advice.buffer('restore', path)}"
        )
    if ruled.now.dtype is torch.bool or ruled.now.is_complex():
        raise UsageError(
            f"{advice.buffer(ruled.rule, path)}: it is of {ruled.now.dtype}, which is not summed; give it a rule of its own: "
            f"{advice.buffer('restore', path)}"
        )
