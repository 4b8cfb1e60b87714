"""Job folders: where a job keeps its token, specification, ledger, logs and checkpoints."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import xxhash

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.memory import memory_base, remove_memory
from holdfast.coordinator.service.store import FIRST
from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.observe.transfer_progress import ByteCount
from holdfast.protocol.job import Durable, JobSpec, Resume
from holdfast.protocol.job_report import JobReport, reports
from holdfast.protocol.machine.ownership import refuse_open_to_others
from holdfast.protocol.wire.stored import START_ANEW, decode_file, read_stored, read_stored_word

KEEP_LEDGERS = 5
MEMORY_ADVICE = "it contains the name of the job's snapshot memory; remove it to resume from a checkpoint, without that memory"


def home() -> Path:
    """`$HOLDFAST_HOME`, by default `~/.holdfast`.

    Raises:
        UsageError: the user has no home folder, or the path is not UTF-8.
    """
    try:
        path = Path(os.environ.get("HOLDFAST_HOME") or Path.home() / ".holdfast")
        str(path.absolute()).encode()
    except RuntimeError:
        raise UsageError(
            "this user does not have a home folder, in which jobs are stored: set HOLDFAST_HOME to a folder that you "
            "can write"
        ) from None
    except UnicodeEncodeError:
        raise UsageError(
            f"HOLDFAST_HOME {os.fsencode(path.absolute())!r} is not valid UTF-8: choose another folder"
        ) from None
    return path


def job_dir(name: str) -> Path:
    """The folder of a job."""
    return home() / "jobs" / name


def memory_root() -> Path:
    """The folder of the snapshot memory of this user's jobs in this home."""
    return memory_base() / xxhash.xxh3_64_hexdigest(str(home().absolute()).encode())


def default_name(script: str) -> str:
    """A new name from the script's name and the time: `train-1121-093015-5f3a`."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem) or "job"
    return f"{stem}-{datetime.now():%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_name(name: str, option: str = "--job") -> str:
    """Returns the name. Raises UsageError if it cannot be the name of a folder. option: the one it was given with."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise UsageError(
            f"{option} {name!r}: must begin with a letter or digit and may contain only letters, digits, '.', '_' "
            "and '-'"
        )
    return name


def newest_job() -> str | None:
    """Name of the job that was started last; None: there are no jobs."""
    newest = folders()[:1]
    return newest[0].name if newest else None


def folders() -> list[Path]:
    """The folders of all jobs, beginning with the one that was started last."""
    found = [d for d in (home() / "jobs").glob("*") if (d / "spec.json").is_file()]
    # By the time of spec.json, which is written once per start. The folder's own time changes with everything that is put into
    # it.
    return sorted(found, key=lambda d: (d / "spec.json").stat().st_mtime, reverse=True)


def existing(name: str | None) -> Path:
    """The folder of an existing job; without a name, of the newest one.

    Raises:
        UsageError: there is none.
    """
    chosen = newest_job() if name is None else check_name(name)
    if chosen is None:
        raise UsageError(
            f"there are no jobs in {home() / 'jobs'}; start one with `holdfast run`, or set HOLDFAST_HOME"
        )
    folder = job_dir(chosen)
    if not (folder / "spec.json").is_file():
        names = [d.name for d in folders()[:5]]
        there = f"; the newest jobs are {', '.join(names)}" if names else ""
        raise UsageError(f"the job {chosen!r} does not exist in {home() / 'jobs'}{there}")
    return folder


EXIT_FINISHED, EXIT_FAILED = 0, 1
EXIT_UNSAVED = 3
"""Training has finished or was stopped, but its last state is in no durable tier."""
EXIT_STOPPED = 75
"""Stopped before its end: if it is started again under its name, the job continues from what was saved. (`EX_TEMPFAIL` of
sysexits.h: "the user is invited to retry".) Not 0: `holdfast run ... && python eval.py` must not evaluate an unfinished
training."""
EXIT_LEFT = 130
"""The command was ended by Ctrl-C while the job continues: 128 + SIGINT, as in shells."""
LEFT = "left"
"""Used in place of a job's outcome: the command was ended while the job runs."""


def exit_code(report: JobReport) -> int:
    """The exit code of a command that ran or followed a job, from the report's `outcome` and from `unsaved`, which is set if the
    newest state is in no durable tier."""
    outcome = report.outcome
    if outcome == LEFT:
        return EXIT_LEFT
    if outcome not in ("finished", "stopped"):
        return EXIT_FAILED
    if report.unsaved is not None:
        return EXIT_UNSAVED
    return EXIT_FINISHED if outcome == "finished" else EXIT_STOPPED


def read_report(path: Path, what: str = "", error: type[Exception] = Damaged) -> JobReport:
    """Reads a report. Arguments as for `decode_file`.

    Raises:
        OSError: it cannot be read.
        Damaged: (or `error`) it is not the report of a job.
    """
    return decode_file(reports.decode, path, what, error=error)


class Allocation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Record in a job's folder that a cluster runs the job. The folder's lock would not do, since locks do not work reliably
    across machines."""

    engine: str
    id: str
    """The job's id in the cluster."""
    over: bool = False
    """Whether nothing of it runs any more."""
    namespace: str = ""
    """The namespace of the job's object in Kubernetes."""
    context: str = ""
    """Context of the kubeconfig; empty: its current one."""
    name: str = ""
    """Name of the object in Kubernetes if the folder has another one, because two jobs of one name are in two namespaces."""


_allocations = msgspec.json.Decoder(Allocation)
_specs = msgspec.json.Decoder(JobSpec)


def read_allocation(folder: Path) -> Allocation | None:
    """The allocation of a job; None: it is not one of a cluster."""
    try:
        return read_stored(
            folder / "allocation.json",
            _allocations,
            "it contains the number of the cluster's job; remove the file if that job is not running",
        )
    except FileNotFoundError:
        return None


def write_allocation(folder: Path, allocation: Allocation) -> None:
    """Replaces the file in one step."""
    work = folder / f".allocation.json.{os.getpid()}"
    work.write_bytes(msgspec.json.encode(allocation))
    work.replace(folder / "allocation.json")


def is_running(folder: Path) -> bool:
    """Whether a job is running: its launcher or coordinator holds the lock, or a cluster runs it and its end is not recorded. (A
    job that a cluster has lost without a record counts as running.)"""
    allocation = read_allocation(folder)
    # Checked before the lock, because locks on a shared file system may have an effect only on the machine that took them.
    if allocation is not None and not allocation.over:
        return True
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # A shared lock that is released at once, so that two commands that check at the same time do not take each other for the
        # job.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def find_checkpoints(spec: JobSpec, note: Callable[[str], None]) -> Resume:
    """The checkpoints of all durable tiers to resume from, newest first; for the same step in the order of the tiers.

    Only their manifests, headers and sizes are checked. The rest is checked when a checkpoint is loaded, and the coordinator uses
    the next older one if it turns out to be damaged.
    """
    there: list[Durable] = []
    passed_over: list[str] = []
    with ByteCount(note, "looking through the checkpoints") as count:
        for tier in spec.saving.tiers:
            try:
                steps = Archive(tier.url).candidates(passed_over.append, count.add)
            except HoldfastError as error:
                passed_over.append(f"{tier.url}: {error}")
            else:
                there += [Durable(step, tier.url) for step in steps]
    for why in passed_over:
        note(f"skipped a checkpoint: {why}")
    return Resume(tuple(sorted(there, key=lambda d: -d.step)), tuple(passed_over))


def free_memory(name: str) -> int:
    """Frees the snapshot memory of a job that does not run; returns the number of bytes.

    Raises:
        UsageError: the job is running, so that its memory is in use.
    """
    folder = JobFolder(name)
    try:
        memory = folder.memory
        nbytes = sum(p.stat().st_size for p in memory.rglob("*") if p.is_file())
        remove_memory(memory)
    finally:
        folder.close()
    return nbytes


def memory_of(folder: Path) -> Path:
    """The folder of a job's snapshot memory. The job must have been started.

    Raises:
        UsageError: the file with its identity is damaged.
    """
    return memory_root() / f"{folder.name}-{read_stored_word(folder / 'identity', MEMORY_ADVICE)}"


def sweep_memory() -> None:
    """Frees the snapshot memory of jobs that were killed and whose folder no longer exists."""
    known, unknown = set[str](), list[str]()
    for path in (home() / "jobs").glob("*/identity"):
        try:
            known.add(f"{path.parent.name}-{read_stored_word(path)}")
        except FileNotFoundError:
            continue  # removed just now
        except UsageError:
            unknown.append(f"{path.parent.name}-")  # any memory with that name may be this job's
    # By the identity and not by the name alone: a folder that was removed and created again is another job, whose memory has
    # another identity.
    for folder in memory_root().glob("*"):
        if folder.name not in known and not folder.name.startswith(tuple(unknown)):
            remove_memory(folder)


def read_spec(folder: Path) -> JobSpec:
    """The specification that the job was started with.

    Raises:
        UsageError: it cannot be read.
    """
    return read_stored(
        folder / "spec.json",
        _specs,
        START_ANEW,
    )


def check_own(folder: Path) -> None:
    """Raises UsageError if other users could change what the job runs in its folder, or read its token."""
    try:
        refuse_open_to_others(folder, "the job's folder")
    except OSError as error:
        raise UsageError(f"the job's folder {folder} cannot be read: {error.strerror}") from None


class JobFolder:
    """A job's folder, locked as long as the launcher or the coordinator lives."""

    def __init__(self, name: str, here: bool = True) -> None:
        """here: whether to lock it. False within an allocation, see `Allocation`.

        Raises:
            UsageError: a job of this name is running, or others can write to the folder.
        """
        self.path = job_dir(name)
        self._new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            # Usually there is a file at the place of a folder, and then the error's own text is misleading.
            blocking = next(
                (p for p in (self.path, *self.path.parents) if p.exists() and not p.is_dir()), None
            )
            why = f"{blocking} is not a folder" if blocking else f"{error.filename}: {error.strerror}"
            raise UsageError(
                f"the job's folder cannot be created: {why}; remove it, or set HOLDFAST_HOME to another folder"
            ) from None
        check_own(self.path)
        self.lock = self._lock(name) if here else -1
        self._locks = [self.lock]

    def relock(self) -> str:
        """Locks the job again if its lock file was deleted, as otherwise another launcher of the job would find it free.

        Returns:
            A message about what was done; empty: nothing.
        """
        path = self.path / "lock"
        if not self._locks:
            return ""
        try:
            if os.path.samestat(path.stat(), os.fstat(self._locks[-1])):
                return ""
        except FileNotFoundError:
            pass
        except OSError:
            return ""  # the folder cannot be reached
        try:
            self._locks.append(self._lock(self.path.name))
        except (OSError, UsageError):
            return ""
        return f"{path} was missing and has been restored"

    def _lock(self, name: str) -> int:
        # The coordinator inherits the descriptor. So the job counts as running until both the launcher and the coordinator are
        # gone, and nothing needs to be cleaned up after a crash.
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(
                f"a job named {name!r} is running: see `holdfast status --job {name}`, or choose another name with "
                "--job"
            ) from None
        return lock

    @property
    def memory(self) -> Path:
        """The folder of the job's snapshot memory. Because of the identity, a new job does not adopt an earlier job's of its
        name."""
        path = self.path / "identity"
        if not path.exists():
            # Stored in the folder, so that it exists as long as the job: a folder that was removed and created again is another
            # job, which must not adopt the state of the first.
            path.write_text(secrets.token_hex(4))
        return memory_of(self.path)

    def identify(self) -> None:
        """Chooses the identity of the job's snapshot memory, which other machines then use as well."""
        _ = self.memory

    def prepare(self, spec: JobSpec, note: Callable[[str], None] = lambda text: None) -> Resume:
        """Prepares the folder for a start; returns the checkpoints to resume from.

        note: receives messages about incomplete checkpoints, and the progress if this takes long.
        """
        before = self._report()
        if before is not None and before.outcome == "finished" and before.in_memory is None:
            # The state of a finished job is in its durable tiers. With a new identity the next start begins with empty memory,
            # and the sweep removes the old one.
            (self.path / "identity").unlink(missing_ok=True)
        sweep_memory()
        self.put_away()
        token = self.path / "token"
        # A new token for each start, so that processes left over from an earlier start cannot authenticate to this one.
        token.unlink(missing_ok=True)
        # Created with its mode and exclusively: at no moment can another user read it, and a link that
        # somebody put there is not followed.
        fd = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write(secrets.token_urlsafe(32))
        (self.path / "spec.json").write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
        # Written after the old ledger was put away. A start that dies in between is repeated, and finds the same checkpoints.
        resume = find_checkpoints(spec, note)
        (self.path / "resume.json").write_bytes(msgspec.json.encode(resume))
        return resume

    def _report(self) -> JobReport | None:
        """The report of the previous run; None: there was none, or it was killed."""
        try:
            return read_report(self.path / "report.json")
        except (OSError, Damaged):
            return None

    def put_away(self) -> None:
        """Moves the ledger, report and logs of the previous run to `runs/N`."""
        ledgers = sorted(p.name for p in self.path.glob("job*.sqlite*"))
        if FIRST not in ledgers:
            for name in ("coordinator.json", *ledgers):
                (self.path / name).unlink(missing_ok=True)
            ledgers = []
        old = [p for p in (*ledgers, "report.json", "logs") if (self.path / p).exists()]
        if not old:
            return
        # Imported here because it needs the coordinator's modules, which a process that only opens a job's folder does not.
        from holdfast.engines import starts

        runs = self.path / "runs"
        numbers = [int(d.name) for d in runs.glob("*") if d.name.isdigit()]
        to = runs / str(max(numbers, default=0) + 1)
        to.mkdir(parents=True)
        # The old address goes as well, so that no command uses an earlier coordinator's port for this job.
        for name in (*old, "coordinator.json"):
            if (self.path / name).exists():
                (self.path / name).rename(to / name)
        starts.keep_newest(self.path, KEEP_LEDGERS)

    def discard(self) -> None:
        """Removes the folder of a start that was refused, unless it was there before."""
        if self._new:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Releases the lock."""
        while self._locks:
            if (lock := self._locks.pop()) >= 0:
                os.close(lock)
        self.lock = -1
