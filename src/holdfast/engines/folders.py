"""Prepares the job's folder on machines that do not share the launcher's, and checks whether the job can run there."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from holdfast.checkpoint.tier import open_tier
from holdfast.engines import jobs
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.proof import is_same
from holdfast.protocol.wire.stored import read_stored_word

_MARKER = "here-"
"""Prefix of a marker's name."""


def find_environment_problems(
    *, script: str, module: bool, cwd: str, preload: Sequence[str], digest: str
) -> list[str]:
    """Why the job's script cannot run on this machine; each a sentence without the machine's name.

    digest: SHA-256 of the script, in hex; empty: not known.
    """
    found = []
    folder = Path(cwd)
    if not folder.is_dir():
        found.append(f"the folder {folder} does not exist; the job runs in the same folder on every host")
    elif module:
        sys.path.append(str(folder))
        if importlib.util.find_spec(script.partition(".")[0]) is None:
            found.append(f"the module {script!r} was not found; install the same environment there")
    if not module:
        try:
            if sha256(Path(cwd, script).read_bytes()).hexdigest() != digest and digest:
                found.append(f"{script} differs from the script on the launching machine; copy it")
        except OSError as error:
            found.append(f"{script}: {error.strerror}; copy the script to the same path")
    for name in preload:
        if importlib.util.find_spec(name) is None:
            found.append(f"the module {name!r} (--preload) was not found; install the same environment there")
    return found


def find_tier_problem(url: str, own: Path, shared: bool, name: str) -> str:
    """Why a durable tier cannot be used from this machine; empty: it can.

    Args:
        url: the tier's.
        own: the launcher's folder of the job.
        shared: whether this machine sees that folder.
        name: of the `Markers`.
    """
    folder = Path(url.removeprefix("file://"))
    seen = shared if folder.is_relative_to(own) else is_marked(folder, name)
    if not _is_folder(url) or not str(folder).startswith("/"):
        try:
            open_tier(url).check()
        except HoldfastError as error:
            return f"--checkpoint {url}: {error}"
        return ""
    if not seen:
        # That this path exists here proves nothing, because every machine may have such a folder. Then some nodes' checkpoints
        # would be where the other nodes never look, and the job would notice only when it needs them.
        return (
            f"the checkpoints' folder {folder} is not shared with the launching machine; use --checkpoint with a "
            "folder on a file system that all hosts share, or with an object store"
        )
    return ""


class Markers:
    """Files by which a machine recognizes the folders that it shares with the launcher's machine. They exist within the
    context."""

    def __init__(self, spec: JobSpec, job_dir: Path, name: str) -> None:
        """name: of these files. It must be unique among markers that exist at the same time, because machines look for it."""
        folders = [Path(t.url.removeprefix("file://")) for t in spec.saving.tiers if _is_folder(t.url)]
        own = [f for f in folders if not f.is_relative_to(job_dir)]
        self._files = [folder / (_MARKER + name) for folder in (job_dir, *own)]

    def __enter__(self) -> None:
        for file in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def __exit__(self, *exc: object) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)


def is_marked(folder: Path, name: str) -> bool:
    """Whether this machine sees the launcher's folder. name: of the `Markers`."""
    return (folder / (_MARKER + name)).exists()


def _is_folder(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def has_token(folder: Path, token: str) -> bool:
    """Whether the folder has been prepared for this start of the job, which has this token."""
    try:
        return is_same(read_stored_word(folder / "token"), token)
    except (OSError, UsageError):
        return False


def prepare_folder(folder: Path, spec: JobSpec, token: str, identity: str) -> None:
    """Prepares the folder for an agent. Does nothing if it belongs to this start already: it may be the launcher's own.

    identity: of the job's snapshot memory, see `jobs.JobFolder.memory`.
    """
    if has_token(folder, token):
        return
    jobs.JobFolder(spec.name, here=False).put_away()
    (folder / "token").unlink(missing_ok=True)
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    (folder / "identity").write_text(identity)
    # The token comes last because it means that the rest is complete: after a kill before this line the folder counts as not
    # prepared. As in JobFolder.prepare, other users can never read it.
    with os.fdopen(os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(token)
    jobs.sweep_memory()
