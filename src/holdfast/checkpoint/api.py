"""`holdfast.checkpoint.save` and `load`: a state dict into the tiers, and back from the nearest that has all of it."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.checkpoint import agent_link
from holdfast.checkpoint.backends import AgentBackend, Backend, Copy, PassedOver, StandaloneBackend
from holdfast.checkpoint.loading import SMALL_BYTES, LoadedState, check, flatten, give, read
from holdfast.checkpoint.located import Located
from holdfast.checkpoint.tier import parse_tier
from holdfast.errors import HoldfastError, StateError, UnreadError, UsageError
from holdfast.tensors import staging
from holdfast.tensors.dtensor_shards import local_of
from holdfast.tensors.index import StateIndex
from holdfast.tensors.loaded import has_bytes, tensors_of
from holdfast.tensors.staging import copy_into
from holdfast.tensors.wrappers import inside_of, is_wrapper, parts_of, with_parts

MOST_DEEP = 8
"""So deep a state is looked into: lists and dicts may contain themselves."""

KNOWN = torch.nn.Module, torch.optim.Optimizer
"""Objects whose tensors can be seen without a call of their `state_dict`."""


class Expectation:
    """The size of a state that is to be saved for the first time. Keeps none of it alive.

    A script that finds nothing to load has given its state to `load` all the same. Only its optimizers are not what will be saved,
    because they have no moments yet. So the size is read off when each of them has made a step. None of the script's own code is called
    for that: a `state_dict` may take long, or wait for other ranks.
    """

    def __init__(self) -> None:
        self._told: Callable[[int], None] | None = None
        self._owners: list[weakref.ref[Any]] = []
        self._plain_bytes = 0
        self._first: int | None = None
        self._hooked = False

    def begin(self, state: Mapping[str, Any], told: Callable[[int], None]) -> None:
        """Calls `told` with the bytes of this rank's part: now, or, if the state has optimizers, when they have moments. A
        state before this one is forgotten."""
        self._told, self._first = told, None
        owners: list[Any] = []
        self._plain_bytes = sum(map(_saved_bytes, _tensors(state, owners, MOST_DEEP)))
        known = [owner for owner in owners if isinstance(owner, KNOWN)]
        # Weak: the script may drop what it has loaded into, and its memory is to be free then.
        self._owners = [weakref.ref(owner) for owner in known]
        if not any(isinstance(owner, torch.optim.Optimizer) for owner in known):
            # An object of another kind may hold the optimizer, which is most of the state.
            if len(known) < len(owners):
                self._told = None
            self._tell()
        elif not self._hooked:
            self._hooked = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._told is None:
            return
        # When one steps again, all have stepped: a script with several optimizers calls them in turn.
        if self._first is None:
            self._first = id(optimizer)
        elif self._first == id(optimizer):
            self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, None
        owners = [owner for ref in self._owners if (owner := ref()) is not None]
        self._owners = []
        nbytes = self._plain_bytes + sum(map(_saved_bytes, (t for o in owners for t in _owned(o))))
        if told is not None and nbytes:
            told(nbytes)


def _tensors(value: Any, owners: list[Any], deep: int) -> Iterable[torch.Tensor]:
    """The tensors of plain containers. Objects with a state of their own on the way are put into `owners`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, KNOWN) or hasattr(value, "state_dict"):
        owners.append(value)
    elif deep and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, owners, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, owners, deep - 1)


def _owned(owner: torch.nn.Module | torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """What a state dict of it contains: a tensor that has two names twice."""
    if isinstance(owner, torch.nn.Module):
        # A buffer that is not saved counts as well: a slot may be larger than what it takes.
        for _, tensor in (
            *owner.named_parameters(remove_duplicate=False),
            *owner.named_buffers(remove_duplicate=False),
        ):
            yield tensor
    else:
        yield from _tensors(owner.state, [], MOST_DEEP)


def _saved_bytes(tensor: torch.Tensor) -> int:
    """Of the blob; smaller tensors go with the plain values, see `flatten`."""
    total = 0
    for _, part in parts_of("", tensor):
        local = local_of(part)
        nbytes = local.numel() * local.element_size()
        total += nbytes if nbytes > SMALL_BYTES or isinstance(part, DTensor) else 0
    return total


_log = logging.getLogger(__name__)
COPIED_BYTES = 4 << 20
"""A state for which there was no room is copied, up to this size, in case that the script ends with it: it may be skipped in every
step, so this must cost no more than a millisecond."""

_backends: dict[tuple[str, int, int, int], Backend] = {}
"""By where to, rank, world and store: a script may load before it makes its process group, and make another."""

_copying: list[threading.Thread] = []
_loads = itertools.count(1)
_expectation = Expectation()


def save(state: Mapping[str, Any], step: int, *, to: str | None = None, overlap: bool = False) -> bool:
    """Saves this rank's part of a state; call it on every rank, between two steps.

    Under `holdfast run` it is copied into memory of the node's agent, which sends it to other nodes and to the
    durable tiers that `--checkpoint` names; this returns when the copy is complete. Without a job it is copied into
    memory of this process and written to the tier `to` behind the running script; `flush` waits for that.

    Args:
        state: names to tensors, DTensors, plain values, nested dicts and lists of them, or objects with
            `state_dict` and `load_state_dict`.
        step: committed steps.
        to: without a job: `URL[,every=STEPS|10m][,keep=2][,keep-every=STEPS]`; by default $HOLDFAST_CHECKPOINT.
        overlap: copy what optimizers of torch train and keep while the next forward and backward pass run; every optimizer
            waits for that before its next step. Anything else (buffers, frozen parameters, averaged weights) may change at
            any time, and is copied before this returns. Where the script writes into a trained parameter during the copy,
            the snapshot is given up, with a warning.

    Returns:
        False if the snapshot was skipped, because memory is short or because earlier snapshots are still being stored. With
        `overlap` that is not known yet, and the result is True. It is also True where no snapshot is due (`--snapshot-every`
        of the job; without a job, `every` of the tier): then nothing is copied.

    Raises:
        UsageError: a value that cannot be saved, or nowhere to save to.
    """
    # One overlapping copy at a time. A second one would read the tensors while the first may still be copying
    # an older version of them, and both ask for a slot of the same rank.
    wait_for_copy()
    backend = backend_for(to)
    flat = flatten(state, step)
    # Recorded before anything else is queued on the device: the copy waits for exactly the work that the
    # script has issued so far, and sees the state of this step.
    ready = staging.now(flat.tensors)
    _passed_over.clear()
    fill = backend.begin(flat.index)
    if isinstance(fill, PassedOver):
        _pass_over(backend, flat.index, flat.tensors, fill)
        return True

    def keep(copy: Copy, tensors: Sequence[torch.Tensor], was: list[int] | None = None) -> bool:
        done = fill(copy)
        if isinstance(done, PassedOver):
            _pass_over(backend, flat.index, tensors, done, was)
        return done is True or done is PassedOver.NOT_DUE

    if not overlap:
        return keep(lambda blob: copy_into(blob, flat.tensors, ready), flat.tensors)
    try:
        _hook_optimizers()
        held = _held(state)
        owned = {t.data_ptr(): t for t in held}
        tensors = [t if _is_part(t, owned) else t.to("cpu", copy=True) for t in flat.tensors]
        versions = [(t, t._version) for t in held if not t.is_inference()]
    except BaseException as error:
        # What was begun is given back: other ranks, and the agent, wait for its end.
        with suppress(type(error)):
            fill(partial(_raise, error))
        raise

    def copy_unchanged(blob: memoryview) -> None:
        copy_into(blob, tensors, ready)
        if any(t._version != was for t, was in versions):
            raise StateError(
                "a trained parameter or the optimizer's state for it was changed while it was being copied, and not "
                "by a step of the optimizer; save with overlap=False, or make the change before the save"
            )

    was = _versions(tensors)

    def copy_beside() -> None:
        try:
            keep(copy_unchanged, tensors, was)
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread's errors; training goes on
            _log.warning(f"rank {backend.rank}: no snapshot of step {step}: {error!r}")

    # No daemon: the interpreter's end waits for it. The script was told that this state is saved.
    thread = threading.Thread(target=copy_beside, name="holdfast-copy", daemon=False)
    _copying.append(thread)
    thread.start()
    return True


def load(
    state: MutableMapping[str, Any],
    *,
    source: str | None = None,
    step: int | None = None,
    newer_than: int | None = None,
) -> int | None:
    """Loads the newest complete checkpoint into a state of the same kind as was saved; call it on every rank.

    It is read from the nearest tier that has all of it, shard by shard: memory of the node's agent, of another node,
    disk, object store. The number of ranks and the sharding may be others than at its saving.

    All is read and verified, into host memory of the size of this rank's part, before anything of the state is changed.

    The ranks of a process group agree on what they load: call it after `init_process_group`. Before it, or without
    one, every rank takes the newest that it can read.

    Args:
        state: as for `save`. Tensors are filled in place, plain values replaced, objects given their state dict.
        source: without a job: the tier; by default $HOLDFAST_CHECKPOINT.
        step: this one and no other; by default the newest.
        newer_than: the step of a state that the script has otherwise, and goes on from where nothing newer is here.

    Returns:
        The step it was saved with; None when there is no checkpoint, or none that is newer.

    Raises:
        StateError: checkpoints are there, but none could be loaded; or it is of another model: the message lists the
            differences, and nothing was changed; or an object refused its part.
    """
    # What was saved just now must be loadable. Otherwise a script that saves and loads, as tests do, would go
    # back to the checkpoint before.
    flush()
    backend = backend_for(source)
    reasons: list[str] = []

    def on_skip(why: str) -> None:
        reasons.append(why)
        _log.warning(f"rank {backend.rank} skipped a checkpoint: {why}")

    candidates: Iterator[Located] = (f for f in backend.candidates(on_skip) if step in (None, f.step))
    if newer_than is not None:
        # The newest come first, so the first that is too old ends the search.
        candidates = itertools.takewhile(lambda f: f.step > newer_than, candidates)
    number = next(_loads)
    located = next(candidates, None)
    for attempt in itertools.count():
        about = f"load/{number}/{attempt}"
        # The ranks agree on a checkpoint before any of them reads, and once more afterwards. Ranks that load
        # different steps would go on training with a state that never existed, without any error.
        located = _agreed(backend, located, candidates, about)
        if located is None:
            break
        loaded: LoadedState | None = None
        trouble: HoldfastError | None = None
        try:
            check(state, located, backend.rank)
            loaded = read(state, located, backend)
        except HoldfastError as error:
            trouble = error
        lasting = trouble is not None and not isinstance(trouble, UnreadError)
        # Every rank reports, also those that failed, and before anything is given to an object. If one rank
        # cannot read its part, all go on to an older checkpoint together, and no rank's state has been
        # changed by this one.
        troubles = backend.exchange.gather(f"{about}/read", [str(trouble or ""), lasting])
        if lasting and trouble is not None:
            raise trouble
        for rank, (why, ends) in enumerate(troubles):
            if ends:
                raise StateError(f"rank {rank}: {why}")
        if not any(why for why, _ in troubles):
            # Only after all ranks have read: `load_state_dict` cannot be undone.
            assert loaded is not None
            give(state, located, loaded)
            backend.loaded(located.step)
            expect_as(located, backend)
            return located.step
        if trouble is not None:  # the others may stay with it: this rank may have it from elsewhere
            on_skip(f"{located.where}: {trouble}")
            located = next(candidates, None)
    if newer_than is not None:
        backend.loaded(newer_than)
        return None
    if reasons:
        raise StateError(f"no checkpoint could be loaded: {'; '.join(reasons)}")
    if step is None:
        backend.loaded(None)
        expect(state, backend)
    return None


def expect(state: Mapping[str, Any], backend: Backend) -> None:
    """This state will be saved for the first time: as soon as its size can be known, its memory is brought in."""
    _expectation.begin(state, backend.expect)


def expect_as(located: Located, backend: Backend) -> None:
    """What was loaded will be saved again: this rank's part of it has the same size."""
    # With another number of ranks the parts are others, and nothing is known of them.
    if located.world == backend.world:
        backend.expect(located.heads[backend.rank].index.nbytes)


def _agreed(
    backend: Backend, located: Located | None, candidates: Iterator[Located], about: str
) -> Located | None:
    """The newest candidate, this rank's `found` or a later one, that every rank has. None when there is none."""
    for attempt in itertools.count():
        mine = [located.step, located.identity] if located is not None else [-1, ""]
        # Each rank offers its newest candidate; those that offer a newer one than the oldest step down to
        # their next. It ends, because every round at least one rank goes on to an older candidate. The
        # identity is compared too: two tiers may have different checkpoints of one step.
        offers = backend.exchange.gather(f"{about}/{attempt}", mine)
        oldest = min(offers)
        if all(offer == oldest for offer in offers) or oldest[0] < 0:
            return located if oldest[0] >= 0 else None
        if mine != oldest:
            located = next(candidates, None)
    raise AssertionError("unreachable")


def flush() -> None:
    """Waits until what was saved is where it is to be. The newest state that was given is kept, too, where it was skipped, or,
    under `holdfast run`, where none was due, and nothing has changed it since. At the end of a script this happens by itself."""
    wait_for_copy()
    for backend in _backends.values():
        backend.flush()
    _keep_passed_over()
    for backend in _backends.values():
        backend.flush()


@dataclass(frozen=True, kw_only=True)
class _PassedOver:
    """The newest state that the script gave, of which nothing was copied."""

    backend: Backend
    index: StateIndex
    tensors: list[torch.Tensor]
    """The script's, or copies of them."""
    versions: list[int] | None
    """Of the script's tensors: a state that has changed is that of no step. None: these are copies."""
    process: int
    """A child that the script forks has its parent's."""


_passed_over: list[_PassedOver] = []
"""At most one."""


def _pass_over(
    backend: Backend,
    index: StateIndex,
    tensors: Sequence[torch.Tensor],
    why: PassedOver,
    was: list[int] | None = None,
) -> None:
    """Remembers a state for when the script ends with it. What is small, and what is no tensor, is in the index already. was: the
    tensors' versions when the script gave it; None: it gives it now."""
    if not backend.keeps_newest(why):
        return
    _hook_optimizers()
    _flush_at_exit()
    was = _versions(tensors) if was is None else was
    versions: list[int] | None = was
    if why is PassedOver.SKIPPED and index.nbytes <= COPIED_BYTES:
        # The script may change it before its end: it would have been saved, had there been room. On their own device, where
        # nothing waits for the copy.
        copies = [t.detach().clone() for t in tensors]
        if _versions(tensors) != was:
            return
        tensors, versions = copies, None
    elif any(t.is_inference() for t in tensors):
        return  # nobody counts their changes
    _passed_over[:] = [
        _PassedOver(
            backend=backend, index=index, tensors=list(tensors), versions=versions, process=os.getpid()
        )
    ]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _keep_passed_over() -> None:
    while _passed_over:
        given = _passed_over.pop()
        changed = given.versions is not None and _versions(given.tensors) != given.versions
        if changed or given.process != os.getpid():
            continue
        fill = given.backend.begin(given.index, wanted=True)
        if not isinstance(fill, PassedOver):
            fill(partial(_copy, given.tensors))


def _copy(tensors: list[torch.Tensor], blob: memoryview) -> None:
    copy_into(blob, tensors, staging.now(tensors))


def _raise(error: BaseException, blob: memoryview) -> None:
    raise error


@cache
def _flush_at_exit() -> None:
    atexit.register(flush)


def wait_for_copy() -> None:
    """Waits until nothing reads the saved tensors any more."""
    while _copying:
        _copying.pop().join()


# ---------------------------------------------------------------- where to


def backend_for(to: str | None) -> Backend:
    """This rank's backend; made at the first use."""
    to = to or os.environ.get("HOLDFAST_CHECKPOINT") or ""
    link = agent_link.current()
    rank, world, store = 0, 1, None
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        # Part of the key below by its id: after destroy_process_group and a new init the same rank needs an
        # exchange over the new store.
        store = dist.distributed_c10d._get_default_store()
    key = ("agent" if link is not None else to, rank, world, id(store))
    if key not in _backends:
        _backends[key] = AgentBackend(link, store) if link is not None else _alone(to, rank, world, store)
    return _backends[key]


def _alone(to: str, rank: int, world: int, store: Any) -> StandaloneBackend:
    if not to and "HOLDFAST_WORKER" in os.environ:
        raise UsageError(
            "only the worker itself can save into the memory of its node's agent, not a process that it started: "
            "pass AsyncCheckpointerType.THREAD to dcp.async_save"
        )
    if not to:
        raise UsageError(
            "no destination for the checkpoint: start the script with `holdfast run`, pass save(..., to='folder or "
            "URL'), or set HOLDFAST_CHECKPOINT"
        )
    return StandaloneBackend((parse_tier(to, every="1"),), rank, world, store, to)


# ---------------------------------------------------------------- optimizers wait


_hooked: list[bool] = []
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have waited for a copy, or would have."""


def _hook_optimizers() -> None:
    if not _hooked:
        _hooked.append(True)
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    wait_for_copy()
    _stepped.add(optimizer)
    # An optimizer may write through `.data`, which no version counts.
    if _passed_over and _passed_over[0].tensors and _passed_over[0].versions is not None:
        _passed_over.clear()


def _held(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """What optimizers that wait for a copy train and keep: nothing else changes it in the meantime, if the script leaves it
    alone. What is in no such optimizer may be written to at any moment, whatever it is: averaged weights are parameters of a
    module, too."""
    optimizers = {*_stepped, *(v for v in state.values() if isinstance(v, torch.optim.Optimizer))}
    held = []
    for optimizer in optimizers:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for _, tensor in tensors_of("", [trained, list(optimizer.state.values())]):
            held += [inside_of(t) for _, t in with_parts("", tensor) if has_bytes(t) or is_wrapper(t)]
    return held


def _is_part(tensor: torch.Tensor, owned: Mapping[int, torch.Tensor]) -> bool:
    found = owned.get(tensor.data_ptr())
    return found is not None and has_bytes(found) and tensor.nbytes <= found.nbytes
