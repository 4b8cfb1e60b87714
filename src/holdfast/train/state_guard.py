"""Whether the protected state is still what the commit left: between two commits nothing may change it.

Why: where a fault strikes after the vote, the step is committed while the worker waits for the next generation, and the
rest of the script's step is never run there; and a newcomer fetches the state as the commit left it. A change that the
script makes elsewhere is therefore made by some workers and not by others, or twice where a step is dropped and computed
again. All replicas would agree on the wrong state, so no comparison of replicas finds it. It is looked for without any
fault, in every step.

Torch counts the writes into each tensor, and another tensor is another object or lies elsewhere. So every write that torch
counts is found at the next edge of the step, whatever it wrote: with weights that were swapped for an evaluation and put back
nothing tells that they are what they were, unless their content was read before. `proving` reads it, around work of the
script that may do so.

What torch does not count (`.data`, numpy, other libraries' kernels) shows in content alone. All of it is read in a job's first
steps, where a wrong script shows itself. After that a few bytes of some tensors of every object are compared in every step,
of others each time: `PIECES` tensors of an object, so that a write which is made in every step to the whole of one of n
tensors is found within n / PIECES steps. Buffers of little size, and what other objects hold, are compared whole.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from holdfast.errors import StateChanged, UsageError
from holdfast.tensors import staging
from holdfast.tensors.loaded import has_bytes, tensors_of
from holdfast.tensors.tree import buffer_of
from holdfast.tensors.wrappers import with_parts
from holdfast.train.buffer_rules import Advice, advised
from holdfast.train.constants import ADVICE, Constants
from holdfast.train.state_image import BufferPlace, Protected, persistent_buffers

FIRST_LOOKS = 3
"""So many times at a job's start the content is read, whatever that costs: before step 0, and after steps 0 and 1."""

HEAD_BYTES = 1 << 20
"""So much of every tensor is read then."""

PIECES = 8
"""Of so many tensors of every object some bytes are compared in a step."""

PIECE_BYTES = 64

SMALL_BYTES = 64 << 10
"""Buffers, and what objects of the script's own hold, are compared whole in every step if they are no more than this."""

MOST_MOMENTS = 2048
"""Counts of writes of so many tensors of an optimizer are compared in a step, of others in the next one."""


class StateGuard:
    """Compares the protected objects with what the newest commit left. Local to this worker, and without collectives."""

    def __init__(
        self,
        objects: Protected,
        ruled: Collection[str] = (),
        constants: Constants | None = None,
        advice: Advice | None = None,
        unnamed: Collection[str] = (),
    ) -> None:
        """ruled: paths of buffers that forward passes may change, since a rule says what becomes of them. constants:
        what nothing may change, not even a commit. advice: what errors tell the script to write. unnamed: of the ruled ones
        those whose rule the script has not asked for; it does not expect that what it writes into them between two steps is
        undone."""
        self._advice = advice = advice or Advice()
        constants = constants or Constants({})
        left_out = constants.left_out(objects)
        self._watched: list[_Watched] = [_Constants(constants)] if constants else []
        for name, thing in objects.items():
            if isinstance(thing, torch.nn.Module):
                self._watched += [
                    _Parameters(name, thing, advice, left_out.get(name, ())),
                    _Buffers(name, thing, advice, {*ruled, *(f"{name}.{n}" for n in left_out.get(name, ()))}),
                    _Statistics(name, thing, advice, unnamed),
                ]
            elif isinstance(thing, torch.optim.Optimizer):
                self._watched.append(_Optimizer(name, thing, advice))
            else:
                self._watched.append(_Other(name, thing, advice))
        self._added = AddedState(objects)
        self._in_steps = [w for w in self._watched if w.in_steps]
        self._committed = 0
        self._turn = 0
        self._first_looks = FIRST_LOOKS
        self._on = False

    def note(self, committed: int, from_peer: bool = False) -> None:
        """The state is what a commit left, or a transfer brought. from_peer: the job has been training, so others have
        had their first looks at the script, and wait for this worker."""
        # The first looks are for the script. Others that run the same script have had them, and at this
        # moment they wait for this worker: reading all of a large state would prolong every recovery.
        if from_peer:
            self._first_looks = 0
        self._committed = committed
        self._on = True
        self._turn += 1
        for watched in self._watched:
            watched.note(self._turn, bool(self._first_looks), from_peer)

    def after_step(self) -> None:
        """The script has left the step and asks for the next one.

        Raises:
            StateChanged: something changed since the commit.
        """
        if not self._on:
            return
        c = self._committed
        when = f"between step {c - 1}'s commit and step {c}" if c else "before step 0"
        self._look(
            self._watched,
            when,
            "after a fault some workers would make this change and others would not",
            True,
        )

    def before_update(self, step: int) -> None:
        """The step is about to be reduced.

        Raises:
            StateChanged: something changed since the commit, other than what an optimizer is set to (a learning rate that is set anew in every step).
        """
        if not self._on:
            return
        why = "a step that is interrupted by a fault is computed again, and would make this change twice"
        self._look(self._in_steps, f"in step {step} before step.apply", why, False)

    @contextmanager
    def proving(self) -> Iterator[None]:
        """Around work between two steps that may write into modules and put back what it wrote, such as an evaluation with
        other weights. Their content is read before and after it.

        Raises:
            StateChanged: it differs.
        """
        if not self._on:
            yield
            return
        for watched in self._watched:
            watched.keep_proof()
        yield
        # A fault in the block may have begun another generation, whose state was noted since.
        self.after_step()
        for watched in self._watched:
            watched.accept()

    def release(self) -> None:
        """The state is about to change, as it may."""
        if not self._on:
            return
        # Off before anything else: an update that raises leaves the state partially applied, and a look at it would report
        # the script for what the fault did.
        self._on = False
        for watched in self._watched:
            watched.release()
        self._first_looks = max(0, self._first_looks - 1)

    def _look(self, among: list[_Watched], when: str, why: str, between: bool) -> None:
        """
        Raises:
            StateChanged: there is more state than was protected, or something that is watched is not as it was noted.
        """
        if (path := self._added.found()) is not None:
            raise StateChanged(
                f"{path} was added {when}: a worker that joins later would not have it. Create all parameters, "
                "buffers and parameter groups of the optimizer before run.steps; freeze parameters that are trained "
                "only from a later step on"
            )
        for watched in among:
            if (path := watched.change(between)) is not None:
                raise self._error(watched, path, when, why)

    def _error(self, watched: _Watched, path: str, when: str, why: str) -> StateChanged:
        if isinstance(watched, _Constants):
            return StateChanged(f"{path} was found changed {when}: {watched.remedy}")
        # Advice to put the change into the commit would make this one twice: `step.apply` steps the optimizer itself.
        stepped = [w.name for w in self._watched if isinstance(w, _Optimizer) and w.has_stepped()]
        if stepped and isinstance(watched, _Parameters):
            return StateChanged(
                f"{path} changed {when}, by {stepped[0]}.step(): {why}. Remove that call: step.apply({stepped[0]}) "
                "makes the update as part of the step's commit"
            )
        unprotected = self._advice.unprotected(watched.name)
        put_back = self._advice.put_back() if isinstance(watched, _Parameters) else None
        return StateChanged(
            f"{path} changed {when}: {why}. Make the change in the commit: {watched.remedy}"
            + (f"; or {unprotected}" if unprotected else "")
            + (f". If you swap weights for an evaluation, restore them {put_back}" if put_back else "")
        )


class _Watched:
    """One protected object, or a part of it, and what was seen of it after the commit.

    Attributes:
        in_steps: nothing changes it during a step, either.
    """

    in_steps = True

    def __init__(self, name: str, thing: Any, advice: Advice) -> None:
        self.name, self._thing, self._advice = name, thing, advice
        self.release()

    def read(self) -> tuple[list[torch.Tensor], Any]:
        """Its tensors as they are now, always in the same order, and its plain values."""
        raise NotImplementedError

    def path(self, index: int) -> str:
        """What the tensor with this index in `read` is called."""
        raise NotImplementedError

    @property
    def remedy(self) -> str:
        """What to write instead."""
        raise NotImplementedError

    def release(self) -> None:
        """Forgets what was noted. No tensor is held meanwhile: a `state_dict` may have made it for us."""
        self._digests: list[int] | None = None
        self._proof: list[int] | None = None
        self._pieces: list[_Piece] = []

    def note(self, turn: int, first: bool, arrived: bool) -> None:
        """Remembers what there is. turn: chooses whose bytes are compared. first: its content is read. arrived: it came from
        another worker."""
        tensors, self._plain = self.read()
        self._signs = _signs(tensors)
        self._arrived = arrived
        self._whole = self._is_small(tensors)
        self._proof = None
        limit = None if self._whole else HEAD_BYTES
        self._digests = [_digest(t, limit) for t in tensors] if first or self._whole else None
        self._pieces = [] if self._digests is not None else list(_pieces(tensors, turn))

    def _is_small(self, tensors: list[torch.Tensor]) -> bool:
        """Whether all of its content is compared in every step."""
        return False

    def keep_proof(self) -> None:
        """Reads all content, so that the next look is at that, whatever was written meanwhile."""
        if not self._whole:
            self._proof = [_digest(t, None) for t in self.read()[0]]

    def accept(self) -> None:
        """What it was found to be by its content is what it was noted to be."""
        self._proof, self._signs = None, _signs(self.read()[0])

    def change(self, between: bool) -> str | None:
        """The path of something that is not as it was noted. between: at the edge between two steps."""
        tensors, plain = self.read()
        if (path := _difference(self._plain, plain, self.name)) is not None:
            return path
        signs = _signs(tensors)
        if len(signs) != len(self._signs):
            return self.name
        if self._proof is not None or self._whole:
            return self._other_content(tensors, self._proof or self._digests or [], None)
        if self._digests is not None and (path := self._other_content(tensors, self._digests, HEAD_BYTES)):
            return path
        if signs != self._signs:
            if between or (self._digests is None and not self._arrived):
                return next(self.path(i) for i, was in enumerate(self._signs) if signs[i] != was)
            # In its first forward pass a module may give its parameters other memory (those of an LSTM for cuDNN), with
            # the same content.
            self._signs = signs
        return next((self.path(piece.index) for piece in self._pieces if piece.changed(tensors)), None)

    def _other_content(self, tensors: list[torch.Tensor], was: list[int], limit: int | None) -> str | None:
        return next((self.path(i) for i, t in enumerate(tensors) if _digest(t, limit) != was[i]), None)


class _Parameters(_Watched):
    """A module's. Its buffers have rules of their own."""

    def __init__(
        self, name: str, thing: torch.nn.Module, advice: Advice, without: Collection[str] = ()
    ) -> None:
        named = [(n, p) for n, p in thing.named_parameters() if n not in without]
        # The local shards, found once: FSDP2 swaps a module's parameters for gathered ones during a step, and
        # swaps them back.
        held = [at for n, p in named for at in with_parts(n, p)]
        self._names = [n for n, _ in held]
        self._held = [t for _, t in held]
        self._places = [
            (f"{at}.{n}" if at else n, module._parameters, n, p)
            for at, module in thing.named_modules()
            for n, p in module._parameters.items()
            if p is not None
        ]
        super().__init__(name, thing, advice)

    def change(self, between: bool) -> str | None:
        # Looked for by identity, since what was replaced is still here, and as it was.
        for path, held, name, was in self._places:
            now = held.get(name)
            if now is not was and not _gathered(now, was):
                return f"{self.name}.{path}"
        return super().change(between)

    def read(self) -> tuple[list[torch.Tensor], Any]:
        return self._held, None

    def path(self, index: int) -> str:
        return f"{self.name}.{self._names[index]}"

    @property
    def remedy(self) -> str:
        update = f"{self.name}.update_parameters(model)"
        return self._advice.commit(
            update if hasattr(self._thing, "update_parameters") else f"update({self.name})"
        )


def _gathered(now: torch.Tensor | None, was: torch.Tensor) -> bool:
    """Whether FSDP2 has put a gathered tensor into the place of its shard: a plain one, or what lies on a part of the mesh, as
    tensor and expert parallelism leave it."""
    if now is None or not isinstance(was, DTensor):
        return False
    return not isinstance(now, DTensor) or now.device_mesh.ndim < was.device_mesh.ndim


class _Buffers(_Watched):
    """Those of a module's state that have no rule: nothing but a commit changes them."""

    def __init__(
        self, name: str, thing: torch.nn.Module, advice: Advice, ruled: Collection[str] = ()
    ) -> None:
        self._places = [at for at in persistent_buffers({name: thing}) if at.path not in ruled]
        self._changed: BufferPlace | None = None
        super().__init__(name, thing, advice)

    def read(self) -> tuple[list[torch.Tensor], Any]:
        return [t for at in self._places for _, t in with_parts("", at.tensor)], None

    def _is_small(self, tensors: list[torch.Tensor]) -> bool:
        # A forward pass may write what was there before, such as a mask.
        return sum(at.tensor.nbytes for at in self._places) <= SMALL_BYTES

    def path(self, index: int) -> str:
        parts = [(at, path) for at in self._places for path, _ in with_parts(at.path, at.tensor)]
        self._changed, path = parts[index]
        return path

    @property
    def remedy(self) -> str:
        assert self._changed is not None
        update = f"{self.name}.update_parameters(model)"
        call = self._advice.commit(
            update if hasattr(self._thing, "update_parameters") else f"update({self.name})"
        )
        return f"{call}; if a forward pass changes it, {advised(self._changed, self._advice)}"


class _Statistics(_Buffers):
    """Buffers of torch's own modules, which forward passes of a step may change, and nothing between two steps."""

    in_steps = False

    def __init__(self, name: str, thing: torch.nn.Module, advice: Advice, only: Collection[str]) -> None:
        super().__init__(name, thing, advice)
        self._places = [at for at in self._places if at.path in only]

    @property
    def remedy(self) -> str:
        assert self._changed is not None
        return (
            f"{self._advice.commit(f'update({self.name})')}; if an evaluation changed it, call {self.name}.eval() "
            "before the evaluation; to undo such changes automatically, write "
            f"{self._advice.buffer('restore', self._changed.path)} before training"
        )


class _Optimizer(_Watched):
    """Its moments, and what it is set to. In a step nobody looks: a script may set the learning rate before each update."""

    in_steps = False

    def note(self, turn: int, first: bool, arrived: bool) -> None:
        # Moments are several times as many as parameters. Some thousand are as many as may be looked at in a step without
        # anybody noticing; of more, other ones are looked at in each step.
        states = self._thing.state
        count = max(1, MOST_MOMENTS // max(1, len(next(iter(states.values()), ()))))
        begin = turn * count % max(1, len(states))
        self._only = (0, None) if first or len(states) <= count else (begin, begin + count)
        super().note(turn, first, arrived)

    def read(self) -> tuple[list[torch.Tensor], Any]:
        plain = [
            {k: v._version if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self._thing.param_groups
        ]
        return [t for _, _, t in self._moments()], {"param_groups": plain}

    def has_stepped(self) -> bool:
        """Whether its moments are others than it was noted with. Nothing tells of an optimizer without any, as plain SGD."""
        return _signs(self.read()[0]) != self._signs

    def keep_proof(self) -> None:
        """Nobody swaps moments for an evaluation, and they are twice the size of the parameters."""

    def path(self, index: int) -> str:
        number, key, _ = next(itertools.islice(self._moments(), index, None), (0, "", None))
        return f"{self.name}.state.{number}.{key}"

    def _moments(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for number, state in enumerate(
            itertools.islice(self._thing.state.values(), *self._only), self._only[0]
        ):
            if isinstance(state, dict):
                for key, value in state.items():
                    if type(value) is torch.Tensor:  # nearly always; this is asked in every step
                        yield number, key, value
                    elif isinstance(value, torch.Tensor):
                        yield from ((number, path, part) for path, part in with_parts(key, value))

    @property
    def remedy(self) -> str:
        commit = self._advice.commit(f"update({self.name})")
        return f"{self._advice.schedule(self.name, 'scheduler')} for a schedule, or {commit}"


class _Constants(_Watched):
    """What `run.constant` named. Only counts of writes and addresses are compared; a sign has all content read."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        # Kept over all commits: no commit may change a constant, either.
        self._seen: list[_Sign] | None = None
        super().__init__("run.constant", constants, Advice())

    def read(self) -> tuple[list[torch.Tensor], Any]:
        return self._constants.tensors, None

    def note(self, turn: int, first: bool, arrived: bool) -> None:
        if self._seen is None:
            self._seen = _signs(self._constants.tensors)

    def keep_proof(self) -> None:
        """It has a hash."""

    def accept(self) -> None:
        """It was noted once."""

    def change(self, between: bool) -> str | None:
        now = _signs(self._constants.tensors)
        if now == self._seen:
            return None
        self._seen = now
        return self._constants.changed()

    @property
    def remedy(self) -> str:
        return ADVICE


class _Other(_Watched):
    """Anything with a `state_dict`: that alone says what of it is state, and it may make its tensors anew for each call. So
    their content is read where that is little, and a part of it elsewhere."""

    def read(self) -> tuple[list[torch.Tensor], Any]:
        tensors: list[torch.Tensor] = []
        plain = _split(self._thing.state_dict(), tensors)
        return tensors, plain

    def note(self, turn: int, first: bool, arrived: bool) -> None:
        super().note(turn, first, arrived)
        again, _ = self.read()
        # Tensors that are the same in two calls are those that the object holds.
        self._held = _signs(again) == self._signs

    def change(self, between: bool) -> str | None:
        if not self._held:
            self._signs = _signs(self.read()[0])
        return super().change(between)

    def _is_small(self, tensors: list[torch.Tensor]) -> bool:
        return sum(t.nbytes for t in tensors if has_bytes(t)) <= SMALL_BYTES

    def path(self, index: int) -> str:
        found = (
            at for path, t in tensors_of(self.name, self._thing.state_dict()) for at in with_parts(path, t)
        )
        return next(itertools.islice((path for path, _ in found), index, None), self.name)

    @property
    def remedy(self) -> str:
        kinds = torch.optim.lr_scheduler
        if isinstance(self._thing, kinds.LRScheduler) and not isinstance(
            self._thing, kinds.ReduceLROnPlateau
        ):
            return self._advice.schedule("optimizer", self.name)
        known = next((f"{self.name}.{m}(...)" for m in ("update", "step") if hasattr(self._thing, m)), None)
        return self._advice.commit(known or f"update({self.name})")


def _split(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of the plain values; tensors go into the list."""
    if isinstance(value, torch.Tensor):
        tensors += [t for _, t in with_parts("", value)]
        return None
    if isinstance(value, Mapping):
        return {k: _split(v, tensors) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_split(v, tensors) for v in value]
    return value


def _difference(was: Any, now: Any, path: str) -> str | None:
    """Where two copies of plain values differ; NaN is NaN."""
    if was is now:
        return None
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        return next((p for k in was if (p := _difference(was[k], now[k], f"{path}.{k}"))), None)
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        # Plain values are compared one by one and not as a whole, so the message can name the path that
        # changed.
        pairs = enumerate(zip(was, now, strict=True))
        return next((p for i, (a, b) in pairs if (p := _difference(a, b, f"{path}.{i}"))), None)
    return None if was == now or (was != was and now != now) else path


_Sign = tuple[int, int]
"""How often torch has written into a tensor, and where it lies."""


def _signs(tensors: list[torch.Tensor]) -> list[_Sign]:
    try:
        return [(t._version, t.data_ptr()) for t in tensors]
    except RuntimeError:  # made in inference mode, where torch does not count; or one that has no memory
        return [
            (-1 if t.is_inference() else t._version, t.data_ptr() if has_bytes(t) else 0) for t in tensors
        ]


def _near(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not staging.is_far(tensor)


class _Piece:
    """Some bytes of one tensor, as they were."""

    def __init__(self, index: int, tensor: torch.Tensor, turn: int) -> None:
        self.index = index
        size = min(PIECE_BYTES, tensor.nbytes)
        # Each time other bytes: in the course of many steps all of them have their turn.
        self._at = slice(start := turn * PIECE_BYTES % (tensor.nbytes - size + 1), start + size)
        self._was = self._now(tensor)

    def _now(self, tensor: torch.Tensor) -> bytes | torch.Tensor:
        if _near(tensor):
            return ctypes.string_at(tensor.data_ptr() + self._at.start, self._at.stop - self._at.start)
        return staging.flat(tensor)[self._at].clone()

    def changed(self, tensors: list[torch.Tensor]) -> bool:
        """Whether they are others now."""
        tensor = tensors[self.index]
        if not _readable(tensor):
            return True
        now = self._now(tensor)
        return now != self._was if isinstance(now, bytes) else not torch.equal(now, self._was)  # type: ignore[arg-type]


def _readable(tensor: torch.Tensor) -> bool:
    return has_bytes(tensor) and tensor.is_contiguous()


def _pieces(tensors: list[torch.Tensor], turn: int) -> Iterator[_Piece]:
    """Of some tensors, and in each turn of the next ones. Of a GPU's one alone: the host waits for them."""
    count = len(tensors)
    near = count > 0 and _near(tensors[0])
    for number in range(min(PIECES if near else 1, count)):
        index = (turn * (PIECES if near else 1) + number) % count
        if _readable(tensors[index]):
            yield _Piece(index, tensors[index], turn)


def _digest(tensor: torch.Tensor, limit: int | None) -> int:
    if not has_bytes(tensor):
        return 0  # what a wrapper is made of follows it
    data = staging.flat(tensor.detach().contiguous())[:limit]
    if not _near(data):
        return int(data.sum(dtype=torch.int64))  # computed where it is; the host waits for one number
    return xxhash.xxh3_64_intdigest(buffer_of(data))


class AddedState:
    """Compares what protected modules and optimizers hold with what they held at first. Reads no tensor.

    A newcomer builds the same objects anew and fetches the state of those that were named. So it would not have what was added since (a
    parameter, a buffer, a group), and replicas would go on with different models, each of them healthy.
    """

    def __init__(self, objects: Protected) -> None:
        self._modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self._optimizers = [
            (name, thing, _sizes(thing))
            for name, thing in objects.items()
            if isinstance(thing, torch.optim.Optimizer)
        ]
        self._names = set(_names(self._modules))
        self._note()

    def found(self) -> str | None:
        """The path of one that was added."""
        for name, optimizer, sizes in self._optimizers:
            for number, now in enumerate(_sizes(optimizer)):
                if number >= len(sizes):
                    return f"{name}.param_groups.{number}"
                if now > sizes[number]:
                    return f"{name}.param_groups.{number}.params.{sizes[number]}"
        if all(len(held) == count for held, count in self._counts) and all(
            held.get(name) is was for held, name, was in self._children
        ):
            return None
        added = next((path for path in _names(self._modules) if path not in self._names), None)
        if added is None:
            self._note()  # what was added holds no state, such as a metric that is made when it is needed
        return added

    def _note(self) -> None:
        modules = [module for thing in self._modules.values() for module in thing.modules()]
        # Counts alone would not show a child that took another's place, nor a parameter that was declared
        # as None and is one now.
        self._counts = [
            (held, len(held)) for m in modules for held in (m._parameters, m._buffers, m._modules)
        ]
        self._children: list[tuple[Mapping[str, Any], str, Any]] = [
            (m._modules, name, child) for m in modules for name, child in m._modules.items()
        ]
        self._children += [
            (held, name, None)
            for m in modules
            for held in (m._parameters, m._buffers)
            for name, tensor in held.items()
            if tensor is None
        ]


def _names(modules: dict[str, torch.nn.Module]) -> Iterator[str]:
    for name, module in modules.items():
        yield from (f"{name}.{n}" for n, _ in module.named_parameters())
    yield from (at.path for at in persistent_buffers(modules))


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


STEPPED = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.optim.swa_utils.AveragedModel,
    torch.amp.GradScaler,
)
"""What is used by a commit to change it."""


class UsedState:
    """Compares what `step.apply` is given with what is protected, in the first step.

    A newcomer would begin a schedule or an average anew that a commit uses although nobody protected it.
    """

    def __init__(self, objects: Protected) -> None:
        self._objects = list(objects.values())
        self._known: set[int] = set()
        self._modules: list[tuple[str, torch.nn.Module, list[int]]] = []
        self._plain: dict[str, Any] | None = None
        self._first = True

    def check(
        self, optimizer: Any, scheduler: Any, scaler: Any, parts: Iterable[Callable[..., object]]
    ) -> None:
        """Before the first step is prepared, and in later ones where they have something else.

        Raises:
            UsageError: one keeps state that is not protected.
        """
        given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        for role, thing in given.items():
            if thing is None or id(thing) in self._known:
                continue
            if not self._protects(role, thing) and (hasattr(thing, "state_dict") or role != "scheduler"):
                raise UsageError(
                    f"step.apply({role}=...): this {type(thing).__name__} is not protected, so a worker that joins "
                    f"later would start with a fresh one; call run.protect({role}={role}) before run.steps, together "
                    "with the other objects"
                )
            self._known.add(id(thing))
        if not self._first:
            return
        self._modules.clear()
        for name, thing in (found for part in parts for found in _reached(part)):
            if isinstance(thing, STEPPED) and not self._protects("", thing):
                raise UsageError(
                    f"step.apply(also=...) uses {name}, {_a(thing)} that is not protected: a worker that joins later "
                    f"would start with a fresh one; call run.protect({name.rpartition('.')[2]}=...) before "
                    "run.steps, together with the other objects"
                )
            if isinstance(thing, torch.nn.Module) and not any(thing in _modules_of(o) for o in self._objects):
                self._modules.append((name, thing, _writes(thing)))

    def before(self, scheduler: Any) -> None:
        """The first commit is about to be made."""
        if self._first and scheduler is not None and not hasattr(scheduler, "state_dict"):
            self._plain = dict(getattr(scheduler, "__dict__", {}))

    def after(self, scheduler: Any) -> None:
        """It has been made.

        Raises:
            UsageError: it has changed what is not protected.
        """
        if not self._first:
            return
        self._first = False
        now = getattr(scheduler, "__dict__", {})
        for name, was in (self._plain or {}).items():
            if isinstance(was, int | float) and now.get(name) != was:
                raise UsageError(
                    f"step.apply(scheduler=...): this {type(scheduler).__name__} keeps a count in its attribute "
                    f"{name} but does not have a state_dict, so a worker that joins later would start from zero; add "
                    "state_dict and load_state_dict to it and protect it, or compute the learning rate from "
                    "run.samples alone"
                )
        for name, module, was_written in self._modules:
            if _writes(module) != was_written:
                raise UsageError(
                    f"the commit of the first step changed {name}, {_a(module)} that is not protected: a worker that "
                    "joins later would have different values; protect it before run.steps"
                )
        self._modules.clear()

    def _protects(self, role: str, thing: Any) -> bool:
        if any(thing is other for other in self._objects):
            return True
        # Accelerate's wrappers, and containers of several.
        inner = getattr(thing, role, None) if role else None
        several = getattr(thing, f"{role}s", None) if role else None
        if isinstance(several, list) and several:
            return all(self._protects("", part) for part in several)
        return inner is not None and self._protects("", inner)


def _a(thing: Any) -> str:
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _modules_of(thing: Any) -> Iterable[torch.nn.Module]:
    return thing.modules() if isinstance(thing, torch.nn.Module) else ()


def _writes(module: torch.nn.Module) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in (*module.parameters(), *module.buffers())]


def _reached(call: Any) -> Iterator[tuple[str, Any]]:
    """What a callable uses by name: a method's object, the arguments of a partial, and the variables of a function."""
    if isinstance(call, functools.partial):
        yield from _reached(call.func)
        yield from ((f"argument {i}", value) for i, value in enumerate(call.args))
        yield from call.keywords.items()
        return
    if (owner := getattr(call, "__self__", None)) is not None:
        yield type(owner).__name__, owner
    function = getattr(call, "__func__", call)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    # Not `co_names`, which has the names of attributes, too.
    read = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    yield from ((name, function.__globals__[name]) for name in sorted(read & function.__globals__.keys()))
    yield from zip(
        code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) :],
        function.__defaults__ or (),
        strict=False,
    )
