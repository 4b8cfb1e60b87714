"""Runs a script in this process as `python -u script.py` would, from its first line to the end of the process.

The process was forked from one that had imported the heavy modules. What a script can see of that is put right here: its
`__main__`, arguments, streams and name, and what happens behind its last line.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import io
import os
import pkgutil
import runpy
import signal
import sys
import textwrap
import threading
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from holdfast.errors import HoldfastError
from holdfast.protocol.machine.processes import set_title, word_of
from holdfast.train.imports import own_modules

_kept: list[object] = []
"""Process groups, and what holds them, until the process ends: see `hold_process_groups`."""

_in_use: list[object] = []
"""The process groups of the newest step."""

_HERE = str(Path(__file__))
PACKAGE = str(Path(__file__).parents[1]) + os.sep


def settle(log: str) -> None:
    """Gives this process the output, the signals and the names of a new one, before any code of the script runs.

    log: path of the file to which its output is appended.
    """
    # Straight into the worker's log, so that no last word is lost with a pipe. The streams are those that Python has made
    # at the start of this process's ancestor, by PYTHONIOENCODING and the locale, and they keep nothing back.
    fd = open_log(log)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # The fork server ignores two of them, and whoever started the job may ignore the others, as nohup does. A child inherits
    # that. torchrun handles all four, so that its workers have the usual ones.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:  # else a module has put its own handler there
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # A fork leaves it at the number of the parent's thread.
    if hasattr(main := threading.main_thread(), "_set_native_id"):
        main._set_native_id()


def open_log(path: str) -> int:
    """A descriptor of a file of this worker's, to append to. Where its folder is gone it is made again; where the file system
    refuses that, what is written goes nowhere, and the worker trains on."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)
    except OSError as error:
        with suppress(OSError):
            sys.stderr.write(
                f"holdfast: {path} cannot be written, so there is no log of this worker: {error.strerror}\n"
            )
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def run(script: str, args: Sequence[str], module: bool) -> None:
    """Raises what the script raises. Its `__main__` stays in place behind its end, as for threads that still save something.

    script: a path as it was given, from the current folder, or the name of a module.
    """
    try:
        _run(script, args, module)
    finally:
        _keep_process_groups()  # also those of frames that an exception has left


def _run(script: str, args: Sequence[str], module: bool) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.argv = [script, *map(word_of, args)]
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if module else []), *sys.argv]
    # `ps` and `pkill -f` find it as they would find one of torchrun's.
    set_title(" ".join(sys.orig_argv), Path(sys.executable).name)
    if module:
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(script)  # noqa: PTH100 - a link is not followed: `__file__` has its name
    sys.path.insert(0, str(Path(script).resolve().parent))
    vars(main).update(
        __file__=path, __cached__=None, __package__=None, __loader__=SourceFileLoader("__main__", path)
    )
    exec(_code(path), vars(main))  # noqa: S102


def _code(path: str) -> CodeType:
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)  # of a .pyc file
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def from_the_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of Holdfast that started the script, which would send a reader to the wrong place."""
    hidden = (_HERE, "<frozen runpy>")
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in hidden:
        first = first.tb_next
    return first


def print_errors_of_ours_shortly() -> None:
    """Of a script that plain `python` runs: an error of Holdfast's that ends it is printed with the script's own lines alone, and
    its message in lines of 100 columns. Who has set a hook of their own keeps it."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(PACKAGE)]
    deliberate = isinstance(error, HoldfastError | FileNotFoundError)
    if not deliberate or not frames or error.__cause__ is not None:
        sys.__excepthook__(kind, error, trace)
        return
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    message = f"{kind.__qualname__}: {error}"
    if kind.__module__ != "builtins":
        message = f"{kind.__module__}.{message}"
    lines += [
        f"{line}\n" for line in textwrap.wrap(message, 100, break_long_words=False, break_on_hyphens=False)
    ]
    sys.stderr.write("".join(lines))


def leave(code: int) -> NoReturn:
    """Ends the process as Python would, without tearing every module down: after torch that takes a second.

    What a script can rely on still happens: threads are joined, exit functions run, then what its modules hold is let go, so
    that files are closed and temporary ones removed. Not called are functions of C's `atexit`.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # tells executors to end, then waits for threads that are not daemons
    atexit._run_exitfuncs()
    # A daemon thread that goes on would find its globals unset. Python's own end stops it without a word.
    threading.excepthook = lambda _: None
    _let_go()
    _flush_files()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # whatever the script has put there
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _flush_files() -> None:
    """Those that a library holds, which Python would close."""
    for thing in gc.get_objects():
        try:
            if isinstance(thing, io.IOBase) and not thing.closed and thing.writable():
                thing.flush()
        except Exception:  # noqa: BLE001, S112 - a broken file of the script's, or a proxy of what is gone
            continue


def _let_go() -> None:
    """Of the script's modules, as Python does: the references that `sys.modules` has, then the names in those that something
    else still refers to, those with one underscore first."""
    left = [weakref.ref(sys.modules.pop(name)) for name in own_modules()]
    gc.collect()
    for reference in left:
        if (module := reference()) is None:
            continue
        content: dict[str, Any] = vars(module)
        for first in (True, False):
            for name in list(content):
                if (name[0:1] == "_" != name[1:2]) is first and name != "__builtins__":
                    content[name] = None
    gc.collect()


def hold_process_groups() -> None:
    """Called after each step, so that a process group outlives the DDP module that uses it.

    A script calls `destroy_process_group()` and returns from its `main`, and the last reference to the group goes with the
    module's C++ reducer. That joins the group's threads and keeps the GIL meanwhile, for which one of these may be waiting
    in order to let a tensor go: the process stands for ever (pytorch/pytorch#56297). Torch releases the GIL only where
    the last reference is one of Python's. Under torchrun the first group happens to live on: constructing DDP imports
    `torch.distributed.nn`, whose functions have the default group of that moment as a default argument. A warm process
    has imported it before there was a group.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is not None and (groups := tuple(world.pg_map)):
        _in_use[:] = groups


def _keep_process_groups() -> None:
    if (distributed := sys.modules.get("torch._C._distributed_c10d")) is None:
        return
    kinds = tuple(
        kind
        for name in ("ProcessGroup", "Backend", "Reducer", "Store", "Work")
        if isinstance(kind := getattr(distributed, name, None), type)
    )
    # They are not tracked themselves, but what refers to them is.
    for thing in gc.get_objects():
        _kept.extend(each for each in gc.get_referents(thing) if issubclass(type(each), kinds))
