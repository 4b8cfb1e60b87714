"""Four hosts behind real sshds: each has processes, folders and memory of its own, and an address of loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.coordinator.service.store import Store
from holdfast.protocol.network.sockets import host_and_port

NAMES = "a", "b", "c", "d"
SOURCES = Path(__file__).parents[2] / "src"
TRAIN = Path(__file__).parents[1] / "slurm" / "train_paced.py"
START_S = 20.0
NET = os.environ.get("HOLDFAST_SSH_NET", "127.0.77.")
"""How the hosts' addresses begin: fd77:: for example, where this machine has fd77::1 to fd77::4."""
_UNSHARE = "unshare --pid --fork --kill-child=KILL --mount --mount-proc bash -c"
APART = f"setpriv --pdeathsig KILL {_UNSHARE}".split()
"""Begins a command in namespaces of its own, which end with these tests, however those end."""


def wait_until(holds: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    """There is no event for what other processes do."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


class Host:
    """One sshd, in namespaces that end with it: the end of its first process is a loss of power."""

    def __init__(self, folder: Path, number: int, home: Path, shared: bool) -> None:
        self.name, self.address, self.home = NAMES[number], f"{NET}{number + 1}", home
        self.listens = host_and_port(self.address, 22022)
        self._folder, self._shared = folder / self.name, shared
        self._folder.mkdir()
        self.key = self._folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        self._config = self._folder / "sshd_config"
        self._config.write_text(
            f"ListenAddress {self.listens}\nHostKey {self.key}\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"PasswordAuthentication no\nPermitRootLogin yes\nAuthorizedKeysFile {folder}/user_key.pub\n"
            f"SetEnv PYTHONPATH={SOURCES}\n"
        )
        self._power: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Starts sshd. Where hosts share nothing, the folder of jobs is the host's own; its disk survives a loss of power."""
        disk = self._folder / "disk"
        disk.mkdir(exist_ok=True)
        own = "" if self._shared else f"mount --bind {disk} {self.home} && "
        script = f"{own}mount -t tmpfs tmpfs /dev/shm && mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -f {self._config}"
        log = (self._folder / "sshd.log").open("ab")
        self._power = subprocess.Popen(
            [*APART, script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        wait_until(self._listens, f"sshd of {self.name}: {(self._folder / 'sshd.log').read_text()}", START_S)

    def _listens(self) -> bool:
        probe = ["ssh-keyscan", "-p", "22022", "-T", "1", self.address]
        return bool(subprocess.run(probe, capture_output=True).stdout)

    def off(self) -> None:
        """Power loss: every process of the host and its memory."""
        if self._power is not None:
            # unshare's --kill-child ends the namespace's first process, and the kernel ends the others with it.
            self._power.kill()
            self._power.wait()
            self._power = None

    def pids(self, words: str) -> list[int]:
        """Of this host's processes whose command line has these words."""
        assert self._power is not None
        return [pid for pid in _tree(self._power.pid) if re.search(words, _command(pid))]


class Hosts:
    """All of them, and the configuration of ssh by which they are reached."""

    def __init__(self, folder: Path, shared: bool = False) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "user_key"], check=True)
        self.hosts = {n: Host(folder, i, self.home, shared) for i, n in enumerate(NAMES)}
        self._jobs: list[Job] = []
        self.config = folder / "ssh_config"
        self.known = folder / "known_hosts"
        lines = []
        for host in self.hosts.values():
            lines += [f"Host {host.name}", f"  HostName {host.address}", "  Port 22022"]
        keys = [f"[{h.address}]:22022 {Path(f'{h.key}.pub').read_text()}" for h in self.hosts.values()]
        self.known.write_text("".join(keys))
        lines += ["Host *", f"  IdentityFile {folder}/user_key", "  IdentitiesOnly yes"]
        lines += [f"  UserKnownHostsFile {self.known}", "  GlobalKnownHostsFile /dev/null"]
        self.config.write_text("\n".join(lines) + "\n")
        for host in self.hosts.values():
            host.boot()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def start(self, *args: object, job: str = "job") -> Job:
        """`holdfast run --engine ssh` with a durable tier that all share."""
        self._jobs.append(Job(self, args, job))
        return self._jobs[-1]

    def close(self) -> None:
        for job in self._jobs:
            job.process.kill()  # its coordinator ends with it
            job.process.wait()
        for host in self.hosts.values():
            host.off()


class Job:
    """One `holdfast run`."""

    def __init__(self, hosts: Hosts, args: tuple[object, ...], job: str) -> None:
        self.dir = hosts.home / "jobs" / job
        self.report = hosts.folder / f"{job}.json"
        self._output = hosts.folder / f"{job}.out"
        tier = hosts.folder / f"tier-{job}"
        env = dict(os.environ, HOLDFAST_HOME=str(hosts.home), PYTHONPATH=str(SOURCES))
        command = [
            sys.executable,
            "-m",
            "holdfast.cli",
            "run",
            "--no-ui",
            "--job",
            job,
            "--report",
            self.report,
        ]
        command += ["--engine", "ssh", "--ssh-config", hosts.config]
        command += [] if "--checkpoint" in args else ["--checkpoint", f"{tier},every=20"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*map(str, command), *map(str, args)],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, within_s: float = 60.0) -> None:
        def said() -> bool:
            assert self.process.poll() is None or text in self.output, self.output
            return text in self.output

        wait_until(said, f"{text!r} in\n{self.output}", within_s)

    def step(self) -> int:
        """The newest committed one."""
        if not (self.dir / "coordinator.json").exists():  # the ledger is whole once this is there
            return 0
        store = Store(self.dir / "job.sqlite", read_only=True)
        try:
            return max((s.step for s in store.steps()), default=0)
        finally:
            store.close()

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.output
            return self.step() >= step

        wait_until(there, f"step {step}", 90)

    def finish(self, within_s: float = 110.0) -> dict:
        """Waits for its end; returns the report."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end:\n{self.output[-6000:]}") from None
        return json.loads(self.report.read_text()) if self.report.exists() else {}

    def losses(self) -> list[float]:
        store = Store(self.dir / "job.sqlite", read_only=True)
        try:
            return [s.loss for s in store.steps()]
        finally:
            store.close()

    def events(self, kind: str) -> list[dict]:
        store = Store(self.dir / "job.sqlite", read_only=True)
        try:
            return [e.fields for e in store.events() if e.kind == kind]
        finally:
            store.close()


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                found += [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def missing() -> str:
    """Why these tests cannot run here; empty: they can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root can make"
    if shutil.which("ssh") is None or not Path("/usr/sbin/sshd").exists():
        return "there is no sshd: make ssh-test installs it"
    return ""
