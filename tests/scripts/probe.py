"""Writes down what a process can see of itself, one file for each rank and start; PROBE_KILL: rank 1 then kills its first start."""

import atexit
import ctypes
import faulthandler
import gc
import inspect
import json
import locale
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

import numpy
import torch
import torch._dynamo
import torch.distributed

DEPTH = len(inspect.stack())
PROC = Path("/proc/self")
PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_GET_TIMERSLACK, PR_GET_CHILD_SUBREAPER, PR_GET_NO_NEW_PRIVS = (
    2,
    3,
    30,
    37,
    39,
)


class OfTheScript:
    """To be pickled, and found in the source."""


def named(thing: object) -> str:
    return getattr(thing, "__qualname__", str(thing))


def where(fd: int) -> str:
    """What a descriptor is open on, without numbers."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").partition("[")[0]
    except OSError:
        return ""


def prctl(option: int) -> int:
    value = ctypes.c_int()
    returned = ctypes.CDLL(None).prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value if option in (PR_GET_PDEATHSIG, PR_GET_CHILD_SUBREAPER) else returned


def umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


def of_stream(name: str) -> dict[str, object]:
    stream = getattr(sys, name)
    words = ("name", "encoding", "errors", "line_buffering", "write_through", "newlines", "closed", "mode")
    return {word: getattr(stream, word) for word in words} | {
        "fileno": stream.fileno(),
        "type": type(stream).__name__,
        "buffer": type(stream.buffer).__name__,
        "is the first": stream is getattr(sys, f"__{name}__"),
    }


def of_signals() -> dict[str, object]:
    status = dict(
        line.split(":\t", 1) for line in (PROC / "status").read_text().splitlines() if ":\t" in line
    )
    numbers = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
    return {f"handler of {int(s)}": named(signal.getsignal(s)) for s in numbers} | {
        "blocked": status["SigBlk"],
        "ignored": status["SigIgn"],
        "pending": status["SigPnd"],
        **{f"caught {n}": bool(int(status["SigCgt"], 16) >> (n - 1) & 1) for n in range(1, 65)},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "wakeup": signal.set_wakeup_fd(-1),
    }


def of_main() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "file": main.__file__,
        "spec": str(main.__spec__),
        "loader": type(main.__loader__).__name__,
        "package": main.__package__,
        "builtins": type(main.__builtins__).__name__,
        "names": sorted(name for name in vars(main) if name.startswith("__")),
        "is this module": vars(main) is globals(),
        "pickles": len(pickle.dumps(OfTheScript())) > 0,
        "has a source": "To be pickled" in inspect.getsource(OfTheScript),
        "frames": DEPTH,
    }


def of_sys() -> dict[str, object]:
    hooks = ("excepthook", "unraisablehook", "displayhook", "breakpointhook")
    return {name: named(getattr(sys, name)) for name in hooks} | {
        "argv": [os.fsencode(word).decode("latin-1") for word in sys.argv],
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "flags": str(sys.flags),
        "path": sys.path,
        "trace": str(sys.gettrace()),
        "profile": str(sys.getprofile()),
        "recursion": sys.getrecursionlimit(),
        "switching": sys.getswitchinterval(),
        "bytecode": sys.dont_write_bytecode,
        "file system": (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()),
        "warnings": sys.warnoptions,
        "options": dict(sys._xoptions),
        "prefix": (sys.prefix, sys.base_prefix),
        "dlopen": sys.getdlopenflags(),
        "threads' hook": named(threading.excepthook),
        "locale": (locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "frozen": gc.get_freeze_count() > 0,
        "exit functions": atexit._ncallbacks(),
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process": (multiprocessing.current_process().name, str(multiprocessing.parent_process())),
        "socket timeout": socket.getdefaulttimeout(),
    }


def of_kernel() -> dict[str, object]:
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
    limits = {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    return limits | {
        "descriptors": [where(fd) for fd in fds if fd > 2 and where(fd)],
        "inherited": [fd for fd in fds if where(fd) and os.get_inheritable(fd)],
        "stdin": where(0),
        "threads": sorted((task / "comm").read_text().strip() for task in (PROC / "task").iterdir()),
        "threads of Python": [thread.name for thread in threading.enumerate()],
        "main thread": (
            threading.main_thread() is threading.current_thread(),
            threading.main_thread().native_id == os.getpid(),
        ),
        "children": (PROC / f"task/{os.getpid()}/children").read_text().split(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "nice": os.nice(0),
        "folder": os.getcwd(),
        "umask": oct(umask()),
        "processors": sorted(os.sched_getaffinity(0)),
        "scheduling": os.sched_getscheduler(0),
        "subreaper": prctl(PR_GET_CHILD_SUBREAPER),
        "signal of the parent's end": prctl(PR_GET_PDEATHSIG),
        "dumpable": prctl(PR_GET_DUMPABLE),
        "privileges": prctl(PR_GET_NO_NEW_PRIVS),
        "timer slack": prctl(PR_GET_TIMERSLACK),
        "out of memory": (PROC / "oom_score_adj").read_text().strip(),
        "core dumps": (PROC / "coredump_filter").read_text().strip(),
        "name": (PROC / "comm").read_text().strip(),
        "command line": " ".join((PROC / "cmdline").read_text(errors="replace").strip("\0").split("\0")),
        "executable": str((PROC / "exe").readlink()),
        "users": (os.getresuid(), os.getresgid(), os.getgroups()),
    }


def of_libraries() -> dict[str, object]:
    root = logging.getLogger()
    steps = sys.modules["torch.optim.optimizer"]
    return {
        "root logger": ([str(handler) for handler in root.handlers], root.level, root.manager.disable),
        "logging": (
            named(logging.getLoggerClass()),
            named(logging.getLogRecordFactory()),
            str(logging.lastResort),
        ),
        "loggers": sorted(
            name
            for name, logger in root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and (logger.level or logger.handlers)
        ),
        "warnings": [str(each) for each in warnings.filters],
        "showing": (named(warnings.showwarning), named(warnings.formatwarning)),
        "numpy": (numpy.geterr(), str(numpy.get_printoptions())),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch types": (str(torch.get_default_dtype()), str(torch.get_default_device())),
        "torch modes": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_warn_always_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        "torch printing": str(vars(torch._tensor_str.PRINT_OPTS)),
        "torch backends": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.backends.mkldnn.enabled,
        ),
        "torch devices": torch.cuda.is_initialized(),
        "torch sharing": torch.multiprocessing.get_sharing_strategy(),
        "torch distributed": (
            torch.distributed.is_initialized(),
            torch.distributed.is_torchelastic_launched(),
        ),
        "torch debug": str(torch.distributed.get_debug_level()),
        "torch step hooks": len(steps._global_optimizer_post_hooks) + len(steps._global_optimizer_pre_hooks),
        "torch module hooks": len(torch.nn.modules.module._global_forward_hooks),
    }


def in_libc(name: str) -> bool:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return libc.getenv(os.fsencode(name)) == os.environb.get(os.fsencode(name))


def see() -> dict[str, dict[str, object]]:
    return {
        "signals": of_signals(),
        "environment": dict(os.environ),
        "environment in C": {name: in_libc(name) for name in os.environ},
        "sys": of_sys(),
        "main": of_main(),
        "streams": {name: of_stream(name) for name in ("stdin", "stdout", "stderr")},
        "process": of_kernel(),
        "libraries": of_libraries(),
    }


if __name__ == "__main__":
    rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(os.environ["PROBE_OUT"], f"{rank}-{start}.json").write_text(json.dumps(see(), default=str))
    if os.environ["PROBE_KILL"] and start == "0":
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
