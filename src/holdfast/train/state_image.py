"""The protected state as an image: an index (`tensors.tree`, and each tensor's shape and place in one long sequence of bytes)
and the bytes themselves, which stay where they are: in the live tensors.

Peers, disk and digests all use the same image. Nothing in it is pickled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.errors import StateError, UsageError
from holdfast.tensors import loaded, staging
from holdfast.tensors.dtensor_shards import Submesh, like, local_of, piece_of, place, placed
from holdfast.tensors.index import StateIndex, TensorSpec, with_leaves
from holdfast.tensors.tree import (
    buffer_of,
    by_width,
    dtype_of,
    lay_out,
    pack,
    shards_of_wrappers,
    unpack,
    within_wrappers,
)
from holdfast.tensors.wrappers import inside_of, parts_of, shard_of

Protected = Mapping[str, Any]
"""Name to an object with `state_dict` and `load_state_dict`."""

MOMENT = re.compile(r"\.state\.(\d+)\.[^.]+$")
"""The path of a tensor that an optimizer keeps for its parameter of this number."""


class WithConstants(dict[str, Any]):
    """Protected objects, of which a part is no part of the state: `run.constant` says that it never changes.

    Attributes:
        left_out: by object, the names in its `state_dict`.
    """

    def __init__(self, objects: Protected, left_out: Mapping[str, Collection[str]]) -> None:
        super().__init__(objects)
        self.left_out = left_out


class Image:
    """State at one step: an index and one tensor for each of its entries, in the same order.

    Attributes:
        tensors: contiguous, in host memory or a GPU's. Reading begins when what was queued for them is done.
        near: all of them are in host memory.
        device: the GPU of those that are not.
    """

    def __init__(self, index: StateIndex, tensors: list[torch.Tensor]) -> None:
        self.index = index
        self.tensors = tensors
        far = [t.device for t in tensors if staging.is_far(t)]
        # One device for all: a worker computes on one GPU. What lies on another would be read without waiting
        # for its kernels.
        self.near, self.device = not far, far[0] if far else torch.device("cpu")
        # Recorded by the thread that queued the kernels. A reader on another thread waits for this event, and
        # so never reads a tensor before the update that was queued for it.
        self.ready = staging.now(tensors)
        self._flat = [staging.flat(t) for t in tensors]

    def parts(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The bytes [start, stop) of the image, as views into the tensors, where they are."""
        for spec, flat in zip(self.index.tensors, self._flat, strict=True):
            low, high = max(start, spec.offset), min(stop, spec.offset + spec.nbytes)
            if low < high:
                yield flat[low - spec.offset : high - spec.offset]

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop) of the image, to be read in host memory. Each is there until the next is asked for."""
        return staging.read(self.parts(start, stop), self.ready)

    def filling(self, start: int, stop: int) -> AbstractContextManager[list[memoryview]]:
        """Where to put the bytes [start, stop) of the image; on leaving they are in the tensors."""
        return staging.filling(list(self.parts(start, stop)), self.ready)


def check_protected(objects: Protected) -> None:
    """Raises UsageError for an object that has no state to protect, a module whose tensors appear later, and an optimizer whose
    update computes the loss again."""
    for name, thing in objects.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"run.protect({name}=...): a {type(thing).__name__} does not have state_dict and load_state_dict; "
                "protect modules, optimizers, schedulers or other objects with these two methods"
            )
        if isinstance(thing, torch.nn.Module) and (lazy := _without_shape(thing)):
            raise UsageError(
                f"run.protect({name}=...): {lazy} does not have a shape before the first forward pass, but workers "
                "compare their states before that; call the module once with a sample batch before the training"
            )
        if isinstance(thing, torch.nn.Module):
            _check_modules(name, thing)
        if isinstance(thing, torch.optim.Optimizer) and _needs_closure(thing):
            raise UsageError(
                f"run.protect({name}=...): {type(thing).__name__}.step needs a closure and calls it several times, "
                "but a step computes each micro-batch only once; choose another optimizer"
            )


def check_optimizers(objects: Protected) -> None:
    """Raises UsageError for an optimizer that trains what is in no protected module: its gradients would be added up by
    nobody, and its values would differ between workers."""
    held = {id(p) for t in objects.values() if isinstance(t, torch.nn.Module) for p in t.parameters()}
    for name, thing in objects.items():
        if not isinstance(thing, torch.optim.Optimizer):
            continue
        for number, group in enumerate(thing.param_groups):
            names = group.get("param_names") or range(len(group["params"]))
            for called, parameter in zip(names, group["params"], strict=False):
                if parameter.requires_grad and id(parameter) not in held:
                    raise UsageError(
                        f"run.protect({name}=...): it trains {name}.param_groups.{number}.params.{called}, of shape "
                        f"{tuple(parameter.shape)}, which does not belong to a protected module. Protect its module "
                        "as well, and create the optimizer after any call that replaces parameters, such as "
                        "fully_shard"
                    )


def _check_modules(name: str, thing: torch.nn.Module) -> None:
    """Raises UsageError for parts that work otherwise with a step that is a transaction of many workers."""
    for at, module in thing.named_modules():
        where = f"run.protect({name}=...): {at or name} is {type(module).__name__}"
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{where} with sparse=True, but sparse gradients cannot be summed over workers; create it without "
                "sparse=True, and use an optimizer for dense gradients (AdamW instead of SparseAdam)"
            )
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"{where} with max_norm={module.max_norm}, which changes its weights in each forward pass, and other "
                "rows on each worker; create it without max_norm, and limit the norm of the rows in the commit: "
                f"step.apply(optimizer, also=lambda: weight.copy_(torch.renorm(weight, {module.norm_type}, 0, "
                f"{module.max_norm}))), under torch.no_grad()"
            )
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{where}, which computes its statistics over torch's default process group, and at level 2 that "
                "contains only this worker: it would silently compute like BatchNorm; use BatchNorm, or run the "
                "script at level 1"
            )


def check_restorable(objects: Protected) -> None:
    """Raises UsageError for a tensor of the state that could be saved and not be restored, or not even be read. An optimizer
    keeps tensors only from its first step on: ask again when it does."""
    for name, thing in objects.items():
        loaded.check_restorable(name, thing, _state_of(thing, _left_out(objects, name)))


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _without_shape(module: torch.nn.Module) -> str | None:
    """The first parameter or buffer that a forward pass is to make, as in torch.nn.LazyLinear."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)


def capture(
    objects: Protected, step: int, copy_buffer: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Image:
    """The state of the objects, without copying contiguous tensors, and without waiting for a GPU.

    Args:
        copy_buffer: the image is read while training goes on. It copies a module's buffer, which a forward pass may
            change meanwhile; what other objects than modules and optimizers hold is copied here, for the same reason.

    Raises:
        UsageError: a value that is neither plain nor a tensor; the message has its path.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    tree: dict[str, Any] = {}
    for name, thing in objects.items():
        before = len(tensors)
        tree[name] = pack(_state_of(thing, _left_out(objects, name)), name, tensors)
        # Parameters and moments change only in an update, which waits for readers. Buffers and objects of the
        # script's own may change in the next forward pass, so what is read later must be a copy.
        if copy_buffer is not None and isinstance(thing, torch.nn.Module):
            buffers = {path for n, b in thing.named_buffers() for path, _ in parts_of(f"{name}.{n}", b)}
            tensors[before:] = [(p, copy_buffer(t) if p in buffers else t) for p, t in tensors[before:]]
        elif copy_buffer is not None and not isinstance(thing, torch.optim.Optimizer):
            tensors[before:] = [(path, tensor.detach().clone()) for path, tensor in tensors[before:]]
    leaves = []
    for path, tensor in tensors:
        loaded.check_writable(path, inside_of(tensor))
        leaf = piece_of(path, tensor)
        # No copy where the tensor is contiguous, which is nearly always: an image of 100 GB costs its index.
        local = leaf.local.detach().resolve_conj().resolve_neg().contiguous()
        leaves.append(replace(leaf, local=local, placed=placed(tensor)))
    order = by_width([leaf.local for leaf in leaves])
    place = {number: at for at, number in enumerate(order)}
    tree = {
        name: with_leaves(part, lambda kind, value: [kind, place[value] if kind == "T" else value])
        for name, part in tree.items()
    }
    leaves = [leaves[number] for number in order]
    specs, nbytes = lay_out(leaves)
    return Image(StateIndex(step, tree, specs, nbytes), [leaf.local for leaf in leaves])


def live(objects: Protected) -> dict[str, torch.Tensor]:
    """The tensors that the objects have now, by their paths."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, thing in objects.items():
        pack(thing.state_dict(), name, found)
    return dict(found)


def targets(objects: Protected, index: StateIndex) -> Image:
    """Tensors to receive an index's bytes: the live ones where they fit, elsewhere new ones, on the device of the model."""
    device = _device_of(objects)
    fitting = live(objects)
    # What a wrapper is made of is not written to where it is: a module would then copy the wrapper into itself, and
    # quantize it anew from what it has become.
    within = {path: fitting.pop(path, None) for path in within_wrappers(index)}
    chosen = []
    for spec in index.tensors:
        dtype = dtype_of(spec)
        tensor = fitting.get(spec.path)
        tensor = None if tensor is None else local_of(tensor)
        fits = (
            tensor is not None
            and tensor.device.type in ("cpu", device.type)
            and tensor.dtype == dtype
            and tuple(tensor.shape) == spec.shape
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )
        # Optimizers keep their count of steps on the host.
        # A live tensor is written to only where its bytes mean the same: device, dtype, shape and layout.
        # Elsewhere new memory is taken and `load_state_dict` copies.
        where = device if spec.shape or spec.path in within else torch.device("cpu")
        if (part := within.get(spec.path)) is not None:
            where = part.device
        chosen.append(
            tensor.detach()
            if fits and tensor is not None
            else torch.empty(spec.shape, dtype=dtype, device=where)
        )
    return Image(index, chosen)


def lies_alike(objects: Protected, index: StateIndex) -> bool:
    """Whether the pieces of a saved state are those that this worker has: of the same sharding."""
    for lies in shards_of_wrappers(index):
        model = _model_of(objects, lies["path"])
        if isinstance(model, DTensor) and {**lies, "path": ""} != shard_of("", model):
            return False
    there = live(objects)
    for spec in index.tensors:
        tensor = there.get(spec.path)
        if tensor is None:
            continue
        leaf = piece_of(spec.path, tensor)
        if placed(tensor) != spec.placed or (leaf.global_shape, leaf.start) != (
            spec.global_shape,
            spec.start,
        ):
            return False
    return True


def load(objects: Protected, image: Image, submesh: Submesh | None = None) -> None:
    """Gives every object its part of a complete image. submesh: where a sharded model's tensors lie.

    Raises:
        StateError: the image holds other objects than these, or one refuses its part.
    """
    specs = image.index.tensors
    there: dict[str, torch.Tensor] = {}
    if any(spec.placed for spec in specs):
        there = live(objects)
    tensors = [
        _placed_like(objects, there, spec, tensor, submesh)
        for spec, tensor in zip(specs, image.tensors, strict=True)
    ]
    give(objects, image.index.tree, tensors, submesh)


def _model_of(objects: Protected, path: str) -> torch.Tensor | None:
    """The live tensor of a path, or the parameter for which an optimizer keeps it."""
    name, _, key = path.partition(".")
    thing = objects.get(name)
    found = thing.state_dict().get(key) if isinstance(thing, torch.nn.Module) else None
    return found if isinstance(found, torch.Tensor) else parameter_of(objects, path)


def _placing(
    objects: Protected, submesh: Submesh | None
) -> Callable[[dict[str, Any], torch.Tensor], torch.Tensor]:
    """Makes DTensors of shards that are wrappers."""

    def placing(lies: dict[str, Any], shard: torch.Tensor) -> torch.Tensor:
        shape = tuple(lies["shape"])
        model = _model_of(objects, lies["path"])
        if isinstance(model, DTensor) and {**lies, "path": ""} == shard_of("", model):
            return like(shard, model)
        if submesh is not None and model is None:
            return place(shard, lies["placed"], shape, submesh)
        raise StateError(
            f"{lies['path']} was saved as a shard at {lies['start']} of {shape}, placed as {lies['placed']}, but "
            "this worker holds another shard: tensor subclasses that contain other tensors cannot be resharded, so "
            "start with the same sharding as when it was saved"
        )

    return placing


def _placed_like(
    objects: Protected,
    there: dict[str, torch.Tensor],
    spec: TensorSpec,
    piece: torch.Tensor,
    submesh: Submesh | None,
) -> torch.Tensor:
    """A piece as the tensor that it is a piece of. Its mesh is that of the live tensor or of its parameter: a name alone
    does not tell which of a script's meshes it is."""
    model = there.get(spec.path)
    if model is None:
        model = parameter_of(objects, spec.path)
    if (
        isinstance(model, DTensor)
        and placed(model) == spec.placed
        and tuple(model.shape) == spec.global_shape
    ):
        return like(piece.to(model.device_mesh.device_type), model)
    return place(piece, spec.placed, spec.global_shape, submesh)


def parameter_of(objects: Protected, path: str) -> torch.Tensor | None:
    """The parameter for which an optimizer keeps the tensor of this path."""
    # By number, as `state_dict` of an optimizer has it: its parameters are numbered over all groups in their
    # order, which `param_groups` has too.
    number = MOMENT.search(path)
    optimizer: Any = objects.get(path.split(".", 1)[0])
    if number is None or not isinstance(optimizer, torch.optim.Optimizer):
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return parameters[int(number[1])] if int(number[1]) < len(parameters) else None


def give(
    objects: Protected, tree: Mapping[str, Any], tensors: list[torch.Tensor], submesh: Submesh | None = None
) -> None:
    """Gives every object its part of a tree with these tensors at its leaves.

    Raises:
        StateError: as `load`.
    """
    # Checked before the first object is changed: a half loaded state must not be trained on.
    if set(tree) != set(objects):
        raise StateError(f"the state contains {sorted(tree)}, but this script protects {sorted(objects)}")
    for name, thing in objects.items():
        try:
            state = unpack(tree[name], tensors, placing=_placing(objects, submesh))
            loaded.load(name, thing, state, _left_out(objects, name))
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateError(f"{name} cannot load its state: {error}") from error


def digest(objects: Protected, without: Collection[str] = ()) -> str:
    """xxh3 (64 bits) over tree and bytes: equal digests mean equal state. without: paths of tensors that do not count."""
    image = capture(objects, 0)
    hasher = xxhash.xxh3_64(msgspec.msgpack.encode(image.index))
    for spec in image.index.tensors:
        if spec.path not in without:
            for piece in image.pieces(spec.offset, spec.offset + spec.nbytes):
                hasher.update(piece)
    return hasher.hexdigest()


def parameters_digest(objects: Protected) -> str:
    """xxh3 (64 bits) over the parameters of every protected module, in their order."""
    hasher = xxhash.xxh3_64()
    for thing in objects.values():
        if isinstance(thing, torch.nn.Module):
            for _, part in (at for parameter in thing.parameters() for at in parts_of("", parameter)):
                hasher.update(buffer_of(local_of(part).detach().cpu().contiguous()))
    return hasher.hexdigest()


def buffers_of(objects: Protected) -> list[torch.Tensor]:
    """The buffers of every protected module (running statistics and the like); of those that are made of other tensors,
    these."""
    modules = [t for t in objects.values() if isinstance(t, torch.nn.Module)]
    return [part for module in modules for b in module.buffers() for _, part in parts_of("", b)]


class BufferPlace(NamedTuple):
    """Where a protected module has a buffer."""

    path: str
    """As in the state: the name under which the module is protected, and the buffer's in its `state_dict`."""
    module: torch.nn.Module
    """The one that holds it."""
    name: str
    """There."""

    @property
    def tensor(self) -> torch.Tensor:
        """As it is now."""
        buffer = self.module._buffers[self.name]
        assert buffer is not None
        return local_of(buffer)


def persistent_buffers(objects: Protected) -> Iterator[BufferPlace]:
    """Those that are part of the state, of every protected module."""
    for protected, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            for at, module in thing.named_modules():
                for name, _ in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        yield BufferPlace(".".join(filter(None, (protected, at, name))), module, name)


def _device_of(objects: Protected) -> torch.device:
    """Where the protected modules compute."""
    for thing in objects.values():
        if isinstance(thing, torch.nn.Module):
            for parameter in thing.parameters():
                return parameter.device
    return torch.device("cpu")


def _left_out(objects: Protected, name: str) -> Collection[str]:
    return objects.left_out.get(name, ()) if isinstance(objects, WithConstants) else ()


def _state_of(thing: Any, left_out: Collection[str]) -> Any:
    state = thing.state_dict()
    return {k: v for k, v in state.items() if k not in left_out} if left_out else state
