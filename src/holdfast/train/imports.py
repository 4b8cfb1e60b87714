"""What the script imports, so that processes which wait for a restart import it ahead.

A process imports ahead for itself alone: nobody forks it afterwards, so threads that a module starts stay with it. The
imports must do in an idle process what they do in a worker. What cannot be the same there is noticed, and the agent
goes on without it: see `import_ahead`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

from holdfast.protocol import messages as m
from holdfast.protocol.machine.processes import word_of

NEVER = frozenset({"holdfast", "mpi4py"})
"""Packages whose import joins the job: that is for a worker to do, and never for an idle process."""

DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/accel")
"""Opened by whoever computes on an accelerator. NVML, which only asks for devices, opens none of them."""


def imported(before: Collection[str]) -> tuple[str, ...]:
    """Modules of the standard library and of installed packages that were imported since, parents first.

    The user's own files are not among them: they may be changed until the next start, and a module that was imported
    ahead would be the old one.
    """
    installed, found = _installed(), []
    for name, module in list(sys.modules.items()):
        if name in before or name.partition(".")[0] in NEVER or len(name) > m.MODULE_NAME:
            continue
        spec = getattr(module, "__spec__", None)
        # A module under another name, as `six` makes them, cannot be imported by that name.
        if spec is None or spec.name != name or not isinstance(spec.origin, str):
            continue
        if os.path.realpath(spec.origin).startswith(installed):
            found.append(name)
    return tuple(found[: m.MOST_MODULES])


def own_modules() -> list[str]:
    """`__main__` and the user's own files that were imported, the newest first, as Python lets them go."""
    ours = os.path.join(os.path.realpath(Path(__file__).parents[1]), "")  # noqa: PTH118
    installed = (*_installed(), ours)
    found = []
    modules: list[tuple[str, object]] = list(sys.modules.items())
    for name, module in reversed(modules):
        if not isinstance(module, ModuleType):
            continue  # what a script or a library has put there
        origin = getattr(module.__spec__, "origin", None)
        if not isinstance(origin, str) or not os.path.isabs(origin):  # noqa: PTH117
            origin = installed[0]  # "built-in", "frozen"
        # The disk is asked only where the name alone does not tell: there are thousands of modules.
        is_own = not origin.startswith(installed) and not os.path.realpath(origin).startswith(installed)
        if is_own or name == "__main__":
            found.append(name)
    return found


def _installed() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    return tuple(
        os.path.join(os.path.realpath(paths[kind]), "")  # noqa: PTH118 - a prefix that ends with a slash
        for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    )


_AT_IMPORT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS)_.*|ATEN_CPU_CAPABILITY|PYTORCH_JIT.*|TORCH(DYNAMO|INDUCTOR|_COMPILE|_FAKE_TENSOR|_LOGS).*"
    r"|TORCH_(CPP_LOG_LEVEL|DEVICE_BACKEND_AUTOLOAD|DISTRIBUTED_DEBUG|TRACE|USE_RTLD_GLOBAL)"
)
_LATER = frozenset(("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"))


def read_at_import(name: str) -> bool:
    """Whether torch 2.13, or a library that it loads, reads the variable once, as it is imported: a warm process does not heed a
    later value. (Those of CUDA, NCCL and the allocators are read when they are first used.)"""
    return _AT_IMPORT.fullmatch(name) is not None and name not in _LATER


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Calls `act` once, as soon as the module has been imported."""

    class Finder(MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            if (spec := importlib.util.find_spec(name)) is None or spec.loader is None:
                return None
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                run(module)
                act()

            loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one import
            return spec

    sys.meta_path.insert(0, Finder())


def changed(before: dict[str, str]) -> tuple[str, ...]:
    """Names of the environment that have another value now, or are gone, or were not there."""
    now = dict(os.environ)
    names = {*before, *now}
    return tuple(sorted(n for n in names if before.get(n) != now.get(n)))[: m.MOST_MODULES]


def import_ahead(order: m.Preload) -> m.Preloaded:
    """Imports the modules of `order` in this process, which waits for its start.

    It stops at the first import that fails, that opens an accelerator (its memory is the workers', and only a worker
    knows which device is its own), or that reads a variable which the worker's environment sets. Such a module has read
    another value than the worker would. This process is of no use then; the answer names the packages to leave out.
    """
    # C code reads it without a trace. Where torch is here already, this process is as warm as it was meant to be.
    if "torch" not in sys.modules and (late := next(filter(read_at_import, order.variables), None)):
        return m.Preloaded(tuple(sorted({_package(name) for name in order.modules})), f"torch reads {late}")
    reads = _Reads(order.variables)
    sys.argv = [order.script, *map(word_of, order.args)]
    gc.disable()  # what is imported stays
    name = ""
    try:
        os.chdir(order.cwd)
        with reads:
            for name in order.modules:
                reads.importing = name
                importlib.import_module(name)
                if reads.packages:
                    return m.Preloaded(tuple(sorted(reads.packages)), f"{name} reads {reads.variable}")
                if opened := accelerator():
                    return m.Preloaded((_package(name),), f"{name} opens {opened}")
    except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit too; this process ends then
        return m.Preloaded((_package(name),), f"{name or order.cwd}: {error!r}")
    finally:
        gc.enable()
    return m.Preloaded()


def accelerator(descriptors: Path = Path("/proc/self/fd")) -> str:
    """An accelerator's device file that this process has open; empty: none."""
    for each in descriptors.iterdir():
        try:
            where = str(each.readlink())
        except OSError:
            continue  # closed meanwhile: the folder's own
        if where.startswith(DEVICES):
            return where
    return ""


def _package(module: str) -> str:
    return module.partition(".")[0]


class _Reads:
    """While it is entered: notes which packages are being imported when one of the variables is read."""

    def __init__(self, variables: Iterable[str]) -> None:
        self.packages: set[str] = set()
        self.variable = ""
        self.importing = ""
        """The module of the list that is being imported. One that is written in C has no frame of its own."""
        self._variables = frozenset(variables)
        self._before = type(os.environ)

    def __enter__(self) -> None:
        noted, plain = self._noted, self._before

        class WatchedEnvironment(plain):  # type: ignore[valid-type,misc]
            def __getitem__(self, name: str) -> str:
                noted(name)
                return plain.__getitem__(self, name)

            def __iter__(self) -> Iterator[str]:
                noted(None)
                return plain.__iter__(self)

        # The class of the one object and not another object: modules hold `os.environ` by its own name.
        os.environ.__class__ = WatchedEnvironment

    def __exit__(self, *_: object) -> None:
        os.environ.__class__ = self._before

    def _noted(self, name: str | None) -> None:
        """name: of the variable; None: all of them."""
        if name is not None and name not in self._variables:
            return
        # Whoever imports the reader brings it back in, so all of them are to be left out.
        self.packages.add(_package(self.importing))
        self.variable = name or "the whole environment"
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not import_ahead.__code__:
            if frame.f_code.co_name == "<module>" and (module := frame.f_globals.get("__name__")):
                self.packages.add(_package(module))
            frame = frame.f_back
