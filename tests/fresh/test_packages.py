"""The install steps of the test servers, on a machine that has never heard of their packages.

The commands that they call are stand-ins on PATH: `dpkg-query` knows what the test says, `apt-get` writes down what it
was asked for. Nothing is installed.
"""

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
S3 = [str(TESTS / "s3" / "with-store.sh")]
SLURM = [str(TESTS / "slurm" / "cluster.sh")]
CEPH = ["ceph-common", "ceph-mon", "ceph-osd", "radosgw"]
SLURM_PACKAGES = [
    "iproute2",
    "munge",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurmctld",
    "slurmd",
]
KNOWS_NOTHING = 'echo "dpkg-query: no packages found matching $4" >&2; exit 1'


class Machine:
    """Stand-ins on PATH. installs: what apt-get was asked for, a line a call."""

    def __init__(self, folder: Path) -> None:
        self._bin, self._log = folder / "bin", folder / "apt"
        self._bin.mkdir()
        self.command("apt-get", f'echo "$*" >>{self._log}; [ "$1" = update ] || exit 9')
        self.command("id", "echo 0")
        self.command("dpkg-query", KNOWS_NOTHING)

    def command(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PATH": f"{self._bin}:/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)

    @property
    def installs(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("script", "packages"), [([*S3, "true"], CEPH), ([*SLURM, "with", "true"], SLURM_PACKAGES)]
)
def test_what_was_never_known_is_installed(machine, script, packages):
    ended = machine.run(*script)
    assert machine.installs[0].split()[0] == "update"
    assert machine.installs[1].split()[-len(packages) :] == packages
    # The stand-in installs nothing and says so: that ends the script, with a word.
    assert ended.returncode != 0
    assert "could not install" in ended.stderr
    assert all(name in ended.stderr for name in packages)


@pytest.mark.parametrize(("script", "packages"), [(S3, CEPH), (SLURM, SLURM_PACKAGES)])
@pytest.mark.parametrize(
    ("knows", "installed"),
    [
        (KNOWS_NOTHING, 0),
        ('shift 3; for p; do echo "$p not-installed"; done', 0),
        ('shift 3; echo "$2 installed"; exit 1', 1),
        ('shift 3; for p; do echo "$p installed"; done', -1),
    ],
)
def test_missing_packages_are_told(machine, script, packages, knows, installed):
    machine.command("dpkg-query", knows)
    told = machine.run(*script, "missing")
    assert told.returncode == 0, told.stderr
    missing = told.stdout.split()
    assert len(missing) == (0 if installed < 0 else len(packages) - installed)
    assert set(missing) <= set(packages)
    assert not machine.installs


def test_an_ordinary_user_is_told_what_root_must_install(machine):
    machine.command("id", "echo 1000")
    ended = machine.run(*S3, "true")
    assert ended.returncode == 1
    assert "apt-get install --no-install-recommends " + " ".join(CEPH) in ended.stderr
    assert not machine.installs
