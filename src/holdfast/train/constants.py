"""State that never changes, such as the frozen base under LoRA's adapters: hashed once, and no part of what a step leaves.

It is in no snapshot, no checkpoint and no transfer of the state. What the state has of it is its hash, so that nobody goes on
with other weights: a newcomer whose own bytes have the hash of the others takes none, and any other one fetches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import xxhash

from holdfast.errors import StateChanged, StateError, UsageError
from holdfast.tensors.dtensor_shards import local_of
from holdfast.tensors.index import StateIndex
from holdfast.tensors.loaded import write_into
from holdfast.tensors.tree import unpack
from holdfast.tensors.wrappers import parts_of, with_parts
from holdfast.train import state_image

NAME = "holdfast.constants"
"""Under this name the hashes are in the protected state. No object of a script can have it: it is no keyword."""

HASHES = "hashes"
"""Under this name they are beside the bytes that are served to newcomers."""


class Constants:
    """The tensors that `run.constant` named.

    Attributes:
        names: under which they were given.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], shard: tuple[int, int] = (0, 1)) -> None:
        """shard: the one that this worker holds, of how many.

        Raises:
            UsageError: a module of which nothing is frozen.
        """
        self._shard = shard
        self._frozen = {name: _Frozen(name, module) for name, module in modules.items()}
        self.names = tuple(modules)
        self._digests: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._frozen)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, as they lie here, always in the same order."""
        return [t for frozen in self._frozen.values() for t in frozen.held]

    def left_out(self, objects: state_image.Protected) -> dict[str, frozenset[str]]:
        """What of each protected module is constant, by the names of its `state_dict`."""
        # By identity and not by name: a tied weight has several names, and a snapshot must have it under none of them.
        held = {id(p) for frozen in self._frozen.values() for p in frozen.tensors.values()}
        found = {}
        for name, thing in objects.items():
            if isinstance(thing, torch.nn.Module):
                named = chain(
                    thing.named_parameters(remove_duplicate=False),
                    thing.named_buffers(remove_duplicate=False),
                )
                found[name] = frozenset(n for n, t in named if id(t) in held)
        return {name: names for name, names in found.items() if names}

    @property
    def hashes(self) -> dict[str, str]:
        """Of each name; read once."""
        self._digests = self._digests or self._read()
        return {
            name: xxhash.xxh3_64_hexdigest(
                # With the names: the same bytes under other names are another model.
                repr([*zip(self._frozen[name].parts, digests, strict=True)]).encode()
            )
            for name, digests in self._digests.items()
        }

    def changed(self) -> str | None:
        """The path of a tensor that is not what it was; all are read."""
        before, now = self._digests, self._read()
        for name, digests in before.items():
            pairs = zip(self._frozen[name].parts, digests, now[name], strict=True)
            if (path := next((p for p, was, is_now in pairs if was != is_now), None)) is not None:
                return f"{name}.{path}"
        return None

    def check(self) -> None:
        """Raises StateChanged if they are not what they were."""
        if (path := self.changed()) is not None:
            raise StateChanged(f"{path} changed during training: {ADVICE}")

    # ------------------------------------------------------------ in the state

    def state_dict(self) -> dict[str, Any]:
        """The hashes."""
        return {HASHES: self.hashes, "shard": list(self._shard)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Compares. Where a saved state was cut into other shards, its hashes are of other pieces, and say nothing here.

        Raises:
            UsageError: the state was made with other constants.
        """
        if set(saved[HASHES]) != set(self.names):
            raise UsageError(
                f"the state was saved with run.constant of {sorted(saved[HASHES])}, but this script has "
                f"{sorted(self.names)}: pass the same constants to run.constant"
            )
        # Not compared, and not refused: after a change of the shape, hashes of pieces say nothing. What a
        # newcomer fetches from a peer is compared all the same.
        if list(saved["shard"]) != list(self._shard):
            return
        other = [name for name, found in self.hashes.items() if saved[HASHES][name] != found]
        if other:
            raise UsageError(
                f"run.constant({other[0]}=...): its tensors differ from those that were used when the state was "
                "saved; the state contains only their hash, so build them from the same weights"
            )

    # ------------------------------------------------------------ from a peer

    def image(self) -> state_image.Image:
        """For newcomers: the hashes, and the bytes for those that have others."""
        return state_image.capture({**self._frozen, HASHES: self}, 0)

    def are_those_of(self, index: StateIndex) -> bool:
        """Whether the tensors here have the bytes of a peer's image.

        Raises:
            UsageError: the peer has other tensors.
        """
        # Names and shapes before bytes: a transfer into tensors of other shapes would fail half-way, with the
        # live ones written over.
        mine = [(s.path, s.dtype, s.shape) for s in self.image().index.tensors]
        theirs = [(s.path, s.dtype, s.shape) for s in index.tensors]
        if mine != theirs:
            differ = sorted({path for path, *_ in set(mine) ^ set(theirs)})
            raise UsageError(
                f"run.constant(): {differ[0]} differs from that of the other workers; run the same script on all nodes"
            )
        return bool(_hashes_of(index) == self.hashes)

    @property
    def targets(self) -> state_image.Protected:
        """What receives a peer's bytes."""
        return {**self._frozen, HASHES: self}

    def take(self, image: state_image.Image) -> None:
        """Takes over a peer's bytes.

        Raises:
            StateError: they have not the hash that the peer once found: it has changed them.
        """
        for name, frozen in self._frozen.items():
            frozen.take(unpack(image.index.tree[name], image.tensors))
        self._digests = self._read()
        wrong = [name for name, said in _hashes_of(image.index).items() if self.hashes.get(name) != said]
        if wrong:
            raise StateError(
                f"{wrong[0]}, of run.constant, differs on the peer from what it was when it was hashed: it was "
                "changed there"
            )

    def _read(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, frozen in self._frozen.items():
            image = state_image.capture({name: frozen}, 0)
            found[name] = []
            for spec in image.index.tensors:
                # Dtype and shape are part of it: the same bytes read as another dtype are other weights.
                hasher = xxhash.xxh3_64(f"{spec.dtype} {spec.shape}".encode())
                for piece in image.pieces(spec.offset, spec.offset + spec.nbytes):
                    hasher.update(piece)
                found[name].append(hasher.intdigest())
        return found


ADVICE = (
    "it was passed to run.constant, which is for values that never change. Freeze it (requires_grad_(False)), or "
    "pass it to run.protect instead and change it in the commit"
)


class _Frozen:
    """The constant part of one module: parameters that take no gradient; of a module without others, its buffers too."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        parameters = dict(module.named_parameters())
        self.tensors: dict[str, torch.Tensor] = {n: p for n, p in parameters.items() if not p.requires_grad}
        if not self.tensors:
            raise UsageError(
                f"run.constant({name}=...): none of its parameters is frozen; call requires_grad_(False) on "
                "parameters that never change, or pass the module to run.protect"
            )
        if len(self.tensors) == len(parameters):
            here = {at.path.partition(".")[2] for at in state_image.persistent_buffers({name: module})}
            self.tensors |= {n: b for n, b in module.named_buffers() if n in here}
        # What they are made of. Found once: FSDP2 swaps a module's parameters for gathered ones during a step.
        self.parts = {path: part for n, t in self.tensors.items() for path, part in parts_of(n, t)}
        # Also the wrappers around these: torch counts writes there.
        self.held = [local_of(t) for n, tensor in self.tensors.items() for _, t in with_parts(n, tensor)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {n: t.detach() for n, t in self.parts.items()}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, part in self.parts.items():
            held = local_of(part)
            # A transfer may have written into it already.
            if held.data_ptr() != tensors[name].data_ptr():
                write_into(held, tensors[name])


def _hashes_of(index: StateIndex) -> dict[str, str]:
    found = unpack(index.tree[HASHES], [])[HASHES]
    return {str(name): str(said) for name, said in found.items()}
