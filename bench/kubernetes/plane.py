"""A control plane on this machine's loopback, and machines that exist without a kubelet: etcd, API server, controllers,
scheduler, kwok. It needs no root. Its programs are in the folder KUBE_BIN (tests/kubernetes/programs)."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.processes import Group
from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
READY_S = 180.0
A_DAY = "24h"


def missing() -> list[str]:
    """Programs that KUBE_BIN lacks."""
    return [name for name in (*PROGRAMS, "kwok-stages.yaml") if not (_bin() / name).exists()]


class Plane:
    """Starts everything in a folder; `group` ends it."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.folder, self.group = folder, group
        self.kubeconfig = folder / "kubeconfig"
        self._etcd, self._peers, self._api = _port(), _port(), _port()
        self.scheduler: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns before any of it is ready."""
        token = secrets.token_hex(16)
        tokens, key, public = (self.folder / name for name in ("tokens.csv", "accounts.key", "accounts.pub"))
        tokens.write_text(f'{token},admin,admin,"system:masters"\n')
        _run("openssl", "genrsa", "-out", key, "2048")
        _run("openssl", "rsa", "-in", key, "-pubout", "-out", public)
        cluster = {"server": f"https://127.0.0.1:{self._api}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bench", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "admin"}}],
            "current-context": "bench",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self.kubeconfig.chmod(0o600)
        clients = f"http://127.0.0.1:{self._etcd}"
        peers = f"http://127.0.0.1:{self._peers}"
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync=true",
        )
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={clients}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._api}",
            f"--cert-dir={self.folder / 'certificates'}",
            "--endpoint-reconciler-type=none",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={key}",
            # The second gives each new machine a taint, which the controllers take away again: at 20 requests a second.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )

    def start_rest(self) -> None:
        """What needs the API server."""
        given = f"--kubeconfig={self.kubeconfig}"
        # Machines without a kubelet say seldom that they are there.
        grace = f"--node-monitor-grace-period={A_DAY}"
        self._spawn(
            "kube-controller-manager",
            given,
            "--leader-elect=false",
            grace,
            f"--secure-port={_port()}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder}",
        )
        self.schedule()
        self._spawn(
            "kwok",
            given,
            f"--config={_bin() / 'kwok-stages.yaml'}",
            f"--manage-nodes-with-label-selector={RUN_BY_KWOK}",
        )

    def schedule(self, look_at_percent: int = 0) -> None:
        """Starts a scheduler, and ends the one before. look_at_percent: of the machines that fit, for how many it weighs which
        is best; 0: its default, which is fewer the more machines there are."""
        if self.scheduler is not None:
            self.scheduler.terminate()
            self.scheduler.wait()
        config = self.folder / "scheduler.yaml"
        made = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig)},
            "leaderElection": {"leaderElect": False},
            "percentageOfNodesToScore": look_at_percent,
        }
        config.write_text(yaml.safe_dump(made))
        ports = (f"--secure-port={_port()}", "--bind-address=127.0.0.1", f"--cert-dir={self.folder}")
        self.scheduler = self._spawn("kube-scheduler", f"--config={config}", *ports)

    async def ready(self, api: Api) -> None:
        """The API server answers."""
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    await api.get("/api/v1/namespaces/default")
                    return
                except (ApiError, NoApiAnswer):
                    await asyncio.sleep(0.2)

    def _spawn(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{program}.log"
        return self.group.spawn([_bin() / program, *options], os.environ, log)


RUN_BY_KWOK = "bench/kwok=run"
"""A label. Pods on machines without it do not run, and cost nothing."""


def machine(number: int, stands: Mapping[str, str], run: bool = True) -> dict[str, Any]:
    """A Node that nobody runs, and that says itself that it is ready: kwok would say it of each in a request of its own. stands:
    the labels that say where it is."""
    room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    labels = {"kubernetes.io/hostname": f"m{number}", **stands}
    if run:
        label, _, value = RUN_BY_KWOK.partition("=")
        labels[label] = value
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"m{number}", "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Bench"}],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "phase": "Running",
        },
    }


def _bin() -> Path:
    return Path(os.environ.get("KUBE_BIN", "/nowhere"))


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=60)
