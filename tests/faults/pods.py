"""The pods of a HoldfastJob as processes of this machine: what a kubelet does for the programs in them, and nothing else."""

from __future__ import annotations

import base64
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
from kubejobs import accept

from holdfast.kubernetes import names
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.pod import TerminationMessage
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.protocol.network.sockets import host_and_port

NAME = "llm"


def job_of(script: Path, args: tuple[object, ...], folder: Path, **spec: Any) -> HoldfastJob:
    """A job whose pods run the script in this folder."""
    worker = {
        "name": "worker",
        "image": "none",
        "workingDir": str(folder),
        "resources": {"limits": {"cpu": "1"}},
    }
    return accept(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "HoldfastJob",
            "metadata": {"name": NAME, "namespace": "research", "uid": "u-1", "generation": 1},
            "spec": {
                "run": {"script": str(script), "args": [str(x) for x in args]},
                "procsPerNode": 1,
                "template": {"spec": {"containers": [worker]}},
                **spec,
            },
        }
    )


class Pod:
    """One pod: its folder stays over restarts of its container."""

    def __init__(
        self, rendered: dict[str, Any], address: str, machine: str, folder: Path, config: Path
    ) -> None:
        self.name, self.address = rendered["metadata"]["name"], address
        self.folder = folder
        self._container = rendered["spec"]["containers"][0]
        self._machine, self._config = machine, config
        self._lines: list[str] = []
        self._code: int | None = None
        self._killed: subprocess.Popen[str] | None = None
        self._more = threading.Condition()
        folder.mkdir(parents=True)
        self.process: subprocess.Popen[str] | None = None

    def start(self, **environment: str) -> Pod:
        """Runs its container, for the first time or again."""
        downward = {
            "metadata.name": self.name,
            "status.podIP": self.address,
            "spec.nodeName": self._machine,
        }
        given = {
            one["name"]: one["value"]
            if "value" in one
            else downward[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in self._container["env"]
        }
        # An emptyDir of its own in the place of the mounted folder.
        given |= {names.HOME_VARIABLE: str(self.folder), "HOME": str(self.folder)} | environment
        _, *command = self._container["command"]
        more = [f"--config={self._config}"]
        if names.COORDINATOR_ROLE in command[2]:
            more.append(f"--termination-message={self.folder / 'termination-message'}")
        self.process = subprocess.Popen(
            [sys.executable, *command, *more],
            env=os.environ | given,
            cwd=self._container.get("workingDir"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with self._more:
                    self._lines.append(line)
                    self._more.notify_all()
        code = process.wait()
        with self._more:
            if process is not self._killed:
                self._code = code
            self._more.notify_all()

    def until(self, text: str, times: int = 1) -> None:
        """Waits until so many lines had this text."""
        with self._more:
            self._more.wait_for(lambda: self._code is not None or self.out().count(text) >= times, 60)
        assert self.out().count(text) >= times, self.out()[-3000:]

    def code(self, within_s: float = 60.0) -> int:
        """Waits for its end, killed and restarted containers apart."""
        with self._more:
            assert self._more.wait_for(lambda: self._code is not None, within_s), self.out()[-6000:]
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """The container's end without a warning: a pod's processes share its namespace, so all of them die."""
        assert self.process is not None
        self._killed = self.process
        for pid in _of(self.folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(20)

    def out(self) -> str:
        return "".join(self._lines)

    def termination_message(self) -> TerminationMessage | None:
        path = self.folder / "termination-message"
        return msgspec.json.decode(path.read_bytes(), type=TerminationMessage) if path.exists() else None


class Pods:
    """All pods of one job."""

    def __init__(self, job: HoldfastJob, folder: Path, address: str | None = None) -> None:
        """address: of all of them, who can be one node then; None: each has one of its own."""
        self.job, self._folder, self._address = job, folder, address
        self._config = folder / "config"
        self._config.mkdir(parents=True)
        token = render.secret(job, "t" * 64)["data"][names.TOKEN_FILE]
        (self._config / names.TOKEN_FILE).write_bytes(base64.b64decode(token))
        (self._config / names.SPEC_FILE).write_text(render.config_map(job)["data"][names.SPEC_FILE])
        # Addresses of one machine, which no other job of the tests has.
        self._net = f"127.{random.randrange(64, 250)}.{random.randrange(250)}"
        self.all: list[Pod] = []

    @property
    def coordinator_address(self) -> str:
        """What the Service's name stands for."""
        return self._address or f"{self._net}.1"

    def node(self, number: int) -> Pod:
        """A new node's pod, on a machine of its own."""
        pod = Pod(
            render.agent_pod(self.job, number),
            self._address or f"{self._net}.{10 + number}",
            f"machine-{number}",
            self._folder / f"n{number}",
            self._config,
        )
        self.all.append(pod)
        where = host_and_port(self.coordinator_address, names.COORDINATOR_PORT)
        return pod.start(**{names.COORDINATOR_VARIABLE: where})

    def coordinator(self, term: int) -> Pod:
        """A new coordinator's pod."""
        rendered = render.coordinator_pod(self.job, term)
        pod = Pod(rendered, self.coordinator_address, "machine-0", self._folder / f"c{term}", self._config)
        self.all.append(pod)
        return pod.start()

    def end(self) -> None:
        """Whatever is left."""
        for pod in self.all:
            pod.kill()


def _of(folder: Path) -> list[int]:
    mark = f"{names.HOME_VARIABLE}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
