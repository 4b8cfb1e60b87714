"""What a fork has to change so that it draws random numbers as a new process does.

A new process takes the first state of its generators from the operating system. A fork gets a copy of its parent's: all
workers of a node, and whoever replaces them, would draw the same dropout masks, samples and augmentations. So each fork
takes new states for the generators whose state came from the operating system: torch's, numpy's and Python's own, and
those that imported modules made for themselves. It also takes the random key that `multiprocessing` makes for a process.

A generator that an import seeded with a number keeps it, because a new process that imports the same module has that
number, too. So seeds are watched while modules are imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from array import array
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import numpy as np


_MT19937_BYTES = 624 * 4
"""The whole state of a Mersenne Twister, which numpy's old functions use."""

_AUTHKEY_BYTES = 32
"""As `multiprocessing` makes it."""


class ImportedGenerators:
    """The generators that imports leave behind, and which of them the operating system seeded."""

    def __init__(self) -> None:
        self._chosen: WeakKeyDictionary[random.Random, bool] = WeakKeyDictionary()
        """Python's generators that were made or seeded meanwhile: whether with a number that a new process has, too."""
        self._entropy: set[int] = set()
        """What Python code got from the operating system. numpy's generators know their seed, but not where it is from."""
        self._torch_seed: int | None = None
        """With which torch seeded itself, from the operating system."""
        self._shared_state: tuple[Any, ...] | None = None
        """Of the functions of `random`, where a number seeded them."""
        self._legacy: list[np.random.RandomState] = []
        """numpy's that the operating system seeded. The functions of `numpy.random` are methods of one."""
        self._numpy: list[np.random.BitGenerator] = []
        """The same of the newer kind."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the imports: notices what they seed."""
        shared = random._inst  # whose methods are the functions of the module
        seed, setstate, urandom = random.Random.seed, random.Random.setstate, random._urandom  # type: ignore[attr-defined]

        def noted_seed(generator: random.Random, a: Any = None, *more: Any, **named: Any) -> None:
            self._chosen[generator] = a is not None and a not in self._entropy
            seed(generator, a, *more, **named)

        def noted_setstate(generator: random.Random, state: Any) -> None:
            self._chosen[generator] = True
            setstate(generator, state)

        def noted_urandom(count: int) -> bytes:
            drawn: bytes = urandom(count)
            self._entropy.add(int.from_bytes(drawn, "big"))
            return drawn

        def expose(seeds: Any, sets: Any, draws: Any) -> None:
            random.Random.seed, random.Random.setstate = seeds, sets  # type: ignore[method-assign]
            random.seed, random.setstate = shared.seed, shared.setstate
            random._urandom = draws  # type: ignore[attr-defined]

        if "torch" in sys.modules and self._torch_seed is None:
            self._note_torch()
        finder = _AfterImport("torch", self._note_torch)
        sys.meta_path.insert(0, finder)
        expose(noted_seed, noted_setstate, noted_urandom)
        try:
            yield
        finally:
            expose(seed, setstate, urandom)
            sys.meta_path.remove(finder)
        if self._chosen.get(shared):
            self._shared_state = random.getstate()
        if "torch" in sys.modules and self._torch_seed is None:  # found by a finder of its own
            self._note_torch()
        self._find_numpys()

    def renew(self) -> None:
        """In a fork: takes new states from the operating system, where those of its parent came from there."""
        for generator, chosen in list(self._chosen.items()):
            if not chosen:
                generator.seed()
        if (processes := sys.modules.get("multiprocessing.process")) is not None:
            processes.current_process().authkey = os.urandom(_AUTHKEY_BYTES)
        # Python has seeded these in every fork, whatever their state was before.
        if self._shared_state is not None:
            random.setstate(self._shared_state)
        for legacy in self._legacy:
            # Thirty times as fast as without an argument, which stretches 128 bits to so many.
            legacy.seed(array("I", os.urandom(_MT19937_BYTES)))
        for bits in self._numpy:
            bits.__setstate__(type(bits)().__getstate__())  # type: ignore[attr-defined]
        if self._torch_seed is not None:
            default = sys.modules["torch"].default_generator
            if default.initial_seed() == self._torch_seed:  # the imports seeded it with no other
                default.seed()  # an accelerator's generators are made by each process that uses it

    def _note_torch(self) -> None:
        self._torch_seed = sys.modules["torch"].default_generator.initial_seed()

    def _find_numpys(self) -> None:
        if "numpy.random" not in sys.modules:
            return
        from numpy.random import MT19937, BitGenerator, RandomState, SeedSequence

        def drawn(bits: np.random.BitGenerator) -> bool:
            # None: seeded by the old functions, as `numpy.random.seed`.
            seeds = bits.seed_seq
            return isinstance(seeds, SeedSequence) and seeds.entropy in self._entropy

        # By type(), because objects that imitate others answer isinstance() with code of their own.
        every = gc.get_objects()
        states = [x for x in every if issubclass(type(x), RandomState)]
        # One of another kind has no `seed`.
        states = [x for x in states if isinstance(x._bit_generator, MT19937)]
        self._legacy = [x for x in states if drawn(x._bit_generator)]
        theirs = {id(x._bit_generator) for x in states}
        bits = [x for x in every if issubclass(type(x), BitGenerator)]
        self._numpy = [x for x in bits if id(x) not in theirs and drawn(x)]


class _AfterImport(MetaPathFinder):
    """Calls back as soon as one module is imported, before whoever imports it runs on."""

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name, self._imported = name, imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                run(module)
                self._imported()

            loader.exec_module = exec_module
        return spec
