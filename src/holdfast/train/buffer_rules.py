"""What becomes of module buffers that a forward pass changes, such as running statistics or the loads of experts.

Each worker's forward passes see other samples, so each would end a step with another value. A rule says what the commit makes
of them. Under "sequence", "sum" and "mean" every micro-batch starts from the value that the last commit left, and what each of
them changed is added up over the micro-batches of the whole global batch. So the value after a step does not depend on how many
workers there are, nor on which of them had which micro-batch.

A running average moves by r += m * (x - r) in each forward pass. K of them, one after the other, come to
r + sum of (1 - m) ** (K - 1 - k) * m * (x[k] - r), for k from 0, and the last factor is what micro-batch k has changed. So
"sequence" weighs the changes by their place in the global batch, and gives what one worker gets that computes the
micro-batches in turn. A cumulative average of n values before moves by (x - r) / (n + 1); K of them come to
r + (n + 1) / (n + K) times the sum of what each has changed.

Torch's own modules that have such buffers get their rule without being named.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from holdfast.errors import UsageError
from holdfast.tensors.loaded import is_expanded
from holdfast.tensors.wrappers import is_wrapper
from holdfast.train.generation_group import GenerationGroup
from holdfast.train.placements import is_spread
from holdfast.train.state_image import BufferPlace, Protected, persistent_buffers

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding


class Advice:
    """What error messages tell the user to write. This one is for a script that has a `Run`."""

    def buffer(self, rule: str, path: str) -> str:
        """What gives a buffer a rule."""
        return f'run.buffers("{rule}", "{path}")'

    def commit(self, call: str) -> str:
        """What makes a call part of every step's commit."""
        return f"step.apply(optimizer, also=lambda: {call})"

    def schedule(self, optimizer: str, scheduler: str) -> str:
        """What steps a scheduler with every step. Both are names."""
        return f"step.apply({optimizer}, scheduler={scheduler})"

    def unprotected(self, name: str) -> str | None:
        """How a protected object becomes one that may change at any time; None: it cannot."""
        return f"do not pass `{name}` to run.protect if it need not survive a fault"

    def skip_nonfinite(self) -> str | None:
        """What commits a step without its update when the gradient is not finite; None: the script has no line for it."""
        return "step.apply(optimizer, skip_nonfinite=True)"

    def put_back(self) -> str | None:
        """Where weights may be written into and put back; None: where the script has no line for it."""
        return "inside `with run.relaxed_watchdog():`, which compares their content"


BufferRule = Literal["restore", "sequence", "sum", "mean", "min", "max", "own"]
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
        unnamed: of those that have it without a word of the script's.
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
        named = [path for _, patterns in declared for path in fnmatch_all(self.paths, patterns)]
        self.unnamed = self.paths - set(named)
        self._put = [r for r in found if r.rule != "own"]
        self._summed = [r for r in found if r.rule in ("sequence", "sum", "mean", "min", "max")]
        for ruled in self._summed:
            _check_summed(ruled, advice, alike)
        self._parts = parts
        # Workers of a replica hold a buffer whole, and those with another shard sum it in another group. A row for
        # each micro-batch makes the order of additions the same in all groups, so they get the same bits.
        self._exact = exact or sharded or any(r.rule in ("min", "max") for r in found)
        self._rows: torch.Tensor | None = None
        self._works: list[Any] = []
        self._lay_out()
        self.keep()

    def begin(self, micro_batches: int) -> None:
        """Begins a step. micro_batches: number of them in the global batch."""
        self.put_back()
        if self._summed:
            # A new one for each step: a collective of a step that broke may still hold the older one.
            width = sum(r.now.numel() for r in self._summed)
            rows = micro_batches if self._exact else 1
            # In float64, whatever the buffers are: the sum of many micro-batches in half precision would
            # depend on their number, and with it on the world size.
            self._rows = torch.zeros((rows, width), dtype=torch.float64, device=self._summed[0].now.device)
        self._micro_batches = micro_batches
        # Of a global batch that is one micro-batch the value itself is taken, as of ranges: to take the change and add it
        # again may cost the last bit, and plain torch does not.
        self._is_one = micro_batches == 1 and self._parts == 1

    def after_micro(self, micro: int) -> None:
        """Forward and backward pass of micro-batch `micro` of the global batch are done: activation checkpointing may run
        the forward pass again within the backward pass."""
        if not self._summed:
            return
        assert self._rows is not None
        # All buffers at once: a network has hundreds of them, each of a few hundred numbers, so the calls cost
        # more than the sums.
        torch._foreach_copy_(self._flat_views, [r.now for r in self._summed])
        if self._is_one:
            self._rows[0] += self._flat
            self.put_back()
            return
        # An infinity that stays is no change; its difference would be NaN. Of ranges the value itself counts.
        changed = torch.where(self._flat == self._was, 0.0, self._flat - self._was)
        changed = torch.where(self._is_range, self._flat, changed)
        if self._averages:
            changed *= self._weights(changed, self._micro_batches - 1 - micro)
        self._rows[micro if self._exact else 0] += changed
        self.put_back()

    def reduce_inside(self, sharding: Sharding) -> None:
        """Sums over the workers of a replica that have other micro-batches. It comes before anything that waits for another
        replica: a worker that fails there leaves the step, and the others of its replica would wait for it here.

        Raises:
            CollectiveFault: the generation broke.
        """
        if self._summed:
            assert self._rows is not None
            sharding.sum_over_shards(self._rows)

    def reduce(self, group: GenerationGroup) -> None:
        """Sums over all replicas; every member calls it at the same place of the step.

        Raises:
            CollectiveFault: the generation broke.
        """
        # Where rows of single micro-batches are summed, all others add zeros to them, which changes no bit.
        if self._summed and group.size > 1:
            assert self._rows is not None
            self._works.append(group.allreduce(self._rows))
            group.wait(self._works[0])
            self._works.clear()

    def drain(self, group: GenerationGroup) -> None:
        """After a break: returns when no collective writes to the sums any more."""
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
        divisor = torch.where(self._is_mean, self._micro_batches * self._parts, 1)
        divisor = torch.where(self._is_sequence, self._parts, divisor)
        value = total if self._is_one else self._was + total / divisor
        if self._ranged:
            for rule, fold in (("min", torch.amin), ("max", torch.amax)):
                for ruled, of in zip(self._summed, self._slices, strict=True):
                    if ruled.rule == rule:
                        value[of] = fold(self._rows[:, of], 0)
        if self._has_infinity and bool(value.isnan().any()):
            number = next(n for n, of in enumerate(self._slices) if bool(value[of].isnan().any()))
            path = self._summed[number].at.path
            raise UsageError(
                f"{path} was infinite before this step, so the change of the step that the rule "
                f"{self._summed[number].rule!r} needs cannot be computed; for a minimum or maximum write "
                f"{self.advice.buffer('min', path)} or 'max'"
            )
        torch.where(self._is_whole, value.round(), value, out=self._flat)
        with torch.no_grad():
            torch._foreach_copy_([r.now for r in self._summed], self._flat_views)

    def keep(self) -> None:
        """Takes the present values of the buffers as those of a commit, or of a state that was transferred."""
        if self._put:
            torch._foreach_copy_([r.kept for r in self._put], [r.now.detach() for r in self._put])
        if self._summed:
            torch._foreach_copy_(_views(self._was, self._summed), [r.kept for r in self._summed])

    def put_back(self) -> None:
        """Undoes what forward passes have changed since the commit, in a step or between two."""
        if self._put:
            with torch.no_grad():
                torch._foreach_copy_([r.now for r in self._put], [r.kept for r in self._put])

    def _weights(self, changed: torch.Tensor, left: int) -> torch.Tensor:
        """By what the changes of a micro-batch are multiplied, after which so many are left of the global batch."""
        # A module may be called several times in a micro-batch, and not at all.
        counted = torch.where(self._counted_at < 0, 1.0, changed[self._counted_at])
        before = torch.where(self._counted_at < 0, 0.0, self._was[self._counted_at])
        decay = self._kept_share ** (counted * left)
        total = (before + counted) / (before + counted * self._micro_batches)
        weights = torch.where(self._is_cumulative & (counted > 0), total, decay)
        return torch.cat([weights, weights.new_ones(1)])[self._average_of]

    def _lay_out(self) -> None:
        """Makes the flat tensors in which all summed buffers lie one after the other, as they are now."""
        if not self._summed:
            return
        sizes = torch.tensor([r.now.numel() for r in self._summed])
        device = self._summed[0].now.device

        def each(is_it: Callable[[_Ruled], bool]) -> torch.Tensor:
            return torch.tensor([is_it(r) for r in self._summed]).repeat_interleave(sizes).to(device)

        self._is_mean = each(lambda ruled: ruled.rule == "mean")
        self._is_sequence = each(lambda ruled: ruled.rule == "sequence")
        self._is_range = each(lambda ruled: ruled.rule in ("min", "max"))
        self._ranged = any(ruled.rule in ("min", "max") for ruled in self._summed)
        ends = sizes.cumsum(0).tolist()
        self._slices = [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]
        # For each running average how fast it forgets, and where it counts its forward passes.
        self._averages = [number for number, ruled in enumerate(self._summed) if ruled.rule == "sequence"]
        # An instance norm counts nothing.
        starts = {
            id(ruled.at.module): self._slices[n].start
            for n, ruled in enumerate(self._summed)
            if ruled.at.name == COUNT
            and not isinstance(ruled.at.module, torch.nn.modules.instancenorm._InstanceNorm)
        }
        chosen = [self._summed[number] for number in self._averages]
        momenta: list[Any] = [ruled.at.module.momentum for ruled in chosen]
        self._has_infinity = not bool(
            torch.cat([r.now.reshape(-1).double() for r in self._summed]).isfinite().all()
        )
        self._kept_share = torch.tensor(
            [1.0 if m is None else 1.0 - m for m in momenta], dtype=torch.float64, device=device
        )
        self._is_cumulative = torch.tensor([m is None for m in momenta], device=device)
        self._counted_at = torch.tensor(
            [starts.get(id(ruled.at.module), -1) for ruled in chosen], device=device
        )
        own = torch.full((len(self._summed),), len(chosen))
        own[self._averages] = torch.arange(len(chosen))
        self._average_of = own.repeat_interleave(sizes).to(device)
        self._is_whole = each(lambda ruled: not ruled.now.is_floating_point())
        self._was = torch.zeros(int(sizes.sum()), dtype=torch.float64, device=device)
        self._flat = torch.zeros_like(self._was)
        self._flat_views = _views(self._flat, self._summed)


def fnmatch_all(paths: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    """Those of the paths that one of the patterns names; no pattern names all."""
    return [path for path in paths if any(fnmatch.fnmatchcase(path, p) for p in patterns or ("*",))]


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
    found: dict[str, tuple[BufferPlace, BufferRule]] = {
        at.path: (at, rule)
        for name, thing in objects.items()
        if isinstance(thing, torch.nn.Module) and _is_trained(thing)
        for at in persistent_buffers({name: thing})
        if (rule := known_rule(at)) is not None
    }
    by_themselves = {path: rule for path, (_, rule) in found.items()}
    for rule, patterns in declared:
        for pattern in patterns or ("*",):
            named = fnmatch.filter(there, pattern)
            if patterns and not named:
                shown = ", ".join(list(there)[:8]) or "none"
                raise UsageError(
                    f"{advice.buffer(rule, pattern)}: none of the protected modules has a buffer of this name in its "
                    f"state_dict; the buffers are: {shown}{', …' if len(there) > 8 else ''}"
                )
            for path in named:
                # Added up, an average or a direction grows without bound, and the loss says nothing: what it does to the
                # model is seen in evaluations.
                if rule == "sum" and by_themselves.get(path, "sum") != "sum":
                    raise UsageError(
                        f"{advice.buffer(rule, pattern)}: {path} of torch's {type(there[path].module).__name__} is "
                        "not a count, and a sum over the micro-batches would grow without bound; use this rule only "
                        f'for counts. This buffer gets the rule "{by_themselves[path]}" automatically'
                    )
                found[path] = (there[path], rule)
    return list(found.values())


def _is_trained(thing: torch.nn.Module) -> bool:
    """Whether forward passes are expected to change its buffers. An average's change in commits, and are found elsewhere."""
    averages = isinstance(thing, torch.optim.swa_utils.AveragedModel)
    return not averages and any(p.requires_grad for p in thing.parameters())


COUNT = "num_batches_tracked"


def known_rule(at: BufferPlace) -> BufferRule | None:
    """The rule of a torch module that changes buffers in forward passes; None: it is not known."""
    module, name = at.module, at.name
    if isinstance(module, torch.nn.modules.batchnorm._NormBase):
        return "sum" if name == COUNT else "sequence"
    # Vectors of norm 1 of the power iteration, which depend on the weights alone: all micro-batches get the same. Their sum
    # would grow without bound.
    if type(module).__name__ == "_SpectralNorm" and name in ("_u", "_v"):
        return "mean"
    if name.endswith(("_u", "_v")) and any(
        type(hook).__name__ == "SpectralNorm" and getattr(hook, "name", "") == name[:-2]
        for hook in module._forward_pre_hooks.values()
    ):
        return "mean"
    if name in ("min_val", "max_val") and type(module).__name__ in (
        "MinMaxObserver",
        "PerChannelMinMaxObserver",
    ):
        return "min" if name == "min_val" else "max"
    return None


def advised(at: BufferPlace, advice: Advice) -> str:
    """What to write for a buffer that a forward pass was seen to change."""
    path = at.path
    if at.tensor.dtype is torch.bool:
        return f"write {advice.buffer('restore', path)} before training, if it is used within one step only, like a mask"
    if not at.tensor.is_floating_point():
        return (
            f"write {advice.buffer('sum', path)} before training, if it is a count: what all micro-batches add to it "
            "is summed"
        )
    return (
        f"write {advice.buffer('mean', path)} before training for a running average, a range or a direction (the "
        f"mean over the micro-batches is kept), {advice.buffer('sum', path)} for a count or a load (the "
        f"contributions of all micro-batches are summed), or {advice.buffer('restore', path)} for a buffer that is "
        "used within one step only"
    )


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
        f"{advice.buffer(rule, at.path)}: {what}, to which no rule can be applied; register a plain tensor instead "
        "(tensor.clone())"
    )


def _check_summed(ruled: _Ruled, advice: Advice, alike: int) -> None:
    path = ruled.at.path
    if is_spread(ruled.at.module._buffers[ruled.at.name], alike):
        raise UsageError(
            f"{advice.buffer(ruled.rule, path)}: it is a DTensor, and workers with different micro-batches hold "
            "different parts of it, which cannot be summed; register it as a plain tensor, or choose another rule "
            f"for it: {advice.buffer('restore', path)}"
        )
    if ruled.rule == "sequence" and not hasattr(ruled.at.module, "momentum"):
        raise UsageError(
            f"{advice.buffer(ruled.rule, path)}: this rule works only for the running averages of torch's "
            f"normalization layers, whose momentum is known; choose another rule for {path}: "
            f"{advice.buffer('mean', path)}"
        )
    if ruled.now.dtype is torch.bool or ruled.now.is_complex():
        raise UsageError(
            f"{advice.buffer(ruled.rule, path)}: its dtype {ruled.now.dtype} cannot be summed; choose another rule "
            f"for it: {advice.buffer('restore', path)}"
        )
