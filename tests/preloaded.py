"""One process that has imported torch, out of which the jobs of a test run fork their fork server.

Importing torch and what its first optimizer needs takes four seconds of a processor, and every job does it once: for the
two hundred jobs of the tests that was half of their time. A fork server forked here runs the same `main` with the same
arguments, in a session of its own, with its launcher's folder, output and environment. Only its imports are shared.

It is used where nothing that an import reads can differ. A job with another environment (but for HOLDFAST_*), other
modules to preload, or a folder on the path starts its fork server as users' jobs do.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "HOLDFAST_TEST_PRELOADED"
MODULES = "torch"
HOME = "HOLDFAST_HOME"
HOME_BYTES = 1024
"""Room for the path of a job's home in the environment block: /proc shows this block, and tests look for it there."""
PACKET_BYTES = 65536

_addresses: dict[str, Path] = {}
"""Where this test process's servers listen, by the modules that they have imported; each starts with the first job of its kind."""


def launcher(modules: str = MODULES) -> list[str]:
    """The command line that stands for `python -m holdfast.cli` in a test. modules: what the jobs preload, with commas."""
    return [sys.executable, __file__, "launch", str(_addresses.get(modules) or _start(modules))]


def _start(modules: str) -> Path:
    address = _addresses[modules] = Path(tempfile.mkdtemp(prefix="holdfast-preloaded-")) / "socket"
    lifeline, held = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", __file__, "serve", str(listener.fileno()), str(lifeline), modules],
            env=_comparable(dict(os.environ)) | {HOME: "-" * HOME_BYTES, "OMP_NUM_THREADS": "1"},
            pass_fds=(listener.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.close(lifeline)

    def end() -> None:
        os.close(held)  # the kernel does it where this process is killed
        process.wait(10)

    atexit.register(end)
    return address


def _comparable(environment: dict[str, str]) -> dict[str, str]:
    """What an import may read: everything but Holdfast's own variables and what pytest writes for each test."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("HOLDFAST_", "PYTEST_CURRENT_TEST"))
    }


# ---------------------------------------------------------------------------------------------- in the launcher


def launch(address: str, arguments: list[str]) -> None:
    """`python -m holdfast.cli ARGUMENTS...`, whose fork server comes from the process at `address`."""
    from holdfast.engines.local import fork_server

    spawn = fork_server.ForkServer._spawn

    async def forked(server, channel):
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        modules = ",".join(server._preload)
        request = [modules, environment, str(Path.cwd()), os.umask(0)]
        os.umask(request[3])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(address)
                socket.send_fds(connection, [json.dumps(request).encode()], [channel.fileno(), 1, 2])
                answer, fds = await fork_server._receive(connection)
            except OSError:  # the test process was killed: its job ends as a user's would
                answer, fds = b"", []
        if not fds:
            return await spawn(server, channel)
        return fork_server.AgentProcess(int(answer), fds[0])

    fork_server.ForkServer._spawn = forked
    sys.argv = ["holdfast", *arguments]
    sys.path[0] = str(Path.cwd())  # as with -m
    runpy.run_module("holdfast.cli", run_name="__main__")


# --------------------------------------------------------------------------------------- the process that forks


def serve(listener: socket.socket, lifeline: int, imported: str) -> None:
    """Forks a fork server for every launcher that asks; ends with the test process."""
    # Only the first block of the environment shows in /proc, so its address is taken before anything is set.
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    home = libc.getenv(HOME.encode())
    own = _comparable(dict(os.environ))

    from holdfast.agent import __main__, fork_server, zygote  # noqa: F401 - for its forks
    from holdfast.health.ruleset import catalogue

    generators = zygote.import_modules(imported.split(","))
    catalogue()
    os.environ["SPT_NOENV"] = (
        "1"  # the name's first change finds the arguments, while the environment is as it began
    )
    from setproctitle import setproctitle

    setproctitle("tests' imports")
    del os.environ["SPT_NOENV"]
    signal.signal(signal.SIGCHLD, lambda number, frame: fork_server._reap())
    while lifeline not in select.select([listener, lifeline], [], [])[0]:
        client, _ = listener.accept()
        packet, fds, _, _ = socket.recv_fds(client, PACKET_BYTES, 3)
        if not packet:
            client.close()
            continue
        modules, environment, folder, mask = json.loads(packet)
        long = len(os.fsencode(environment.get(HOME, ""))) > HOME_BYTES
        if modules != imported or _comparable(environment) != own or long:
            client.send(b"differs")
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            if not (pid := os.fork()):
                listener.close()
                client.close()
                os.close(lifeline)
                # What was seeded at an import can only be seen where the import ran.
                zygote.import_modules = lambda modules: generators
                _become(fds, environment, folder, mask, home, imported)
            pidfd = os.pidfd_open(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            socket.send_fds(client, [str(pid).encode()], [pidfd])
            os.close(pidfd)
        client.close()
        for fd in fds:
            os.close(fd)
    shutil.rmtree(Path(listener.getsockname()).parent)


def _become(
    fds: list[int], environment: dict[str, str], folder: str, mask: int, home: int, imported: str
) -> None:
    """The fork server of one job, as if its launcher had started it."""
    from holdfast.agent import fork_server

    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.chdir(folder)
        os.umask(mask)
        os.environ.clear()
        os.environ.update(environment)
        value = os.fsencode(environment.get(HOME, ""))
        ctypes.memmove(home, value + bytes(HOME_BYTES - len(value)), HOME_BYTES)
        for fd, to in zip(fds[1:], (1, 2), strict=True):
            os.dup2(fd, to)
            os.close(fd)
        sys.argv = [fork_server.__file__, str(fds[0]), imported]
        code = fork_server.main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2], sys.argv[3:])
    else:
        serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4])
