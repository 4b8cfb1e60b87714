"""Which machine has the job's coordinator: terms, numbered upward.

A term is claimed by creating `claims/NUMBER` in the job's folder, at which only one process can succeed. The holder of a term
that is not the newest is superseded: it must not send or write anything any more. A shared folder has no events for other
machines' files, so the holder looks every `LOOK_S` seconds, and a successor waits `GRACE_S` seconds before it reads what its
predecessor left.
"""

from __future__ import annotations

import os
from pathlib import Path

LOOK_S = 0.25
GRACE_S = 0.6
FOLDER = "claims"

EXIT_SUPERSEDED = 4
"""Exit code of a coordinator whose place another one has taken: its launcher starts none in its place."""
EXIT_NO_ROOM = 74
"""Of one that the system refused something: a disk that is full, a folder that is away, no memory (EX_IOERR of sysexits.h).
Another is started as soon as there may be room."""
EXIT_OTHER_VERSION = 78
"""Of one whose version the job's processes would not understand (EX_CONFIG of sysexits.h): Holdfast was installed anew while the job
runs."""
EXIT_HANDED_OVER = 75
"""Of one that was asked to go (EX_TEMPFAIL of sysexits.h): another is to be started, and the job has not noticed."""


def newest_term(job_dir: Path) -> int:
    """The number of the newest term; 0 when there never was one."""
    try:
        # The folder is listed, not one name tested: a term may be skipped when the one who claimed it died
        # before it did anything.
        return max((int(p.name) for p in (job_dir / FOLDER).iterdir() if p.name.isdigit()), default=0)
    except FileNotFoundError:
        return 0


def claim_term(job_dir: Path, number: int, who: str) -> bool:
    """Takes the term, unless another has it."""
    folder = job_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        # O_EXCL is the whole election: the file server lets one machine create a name, and tells all others
        # that it exists. A lock would have to be given back by a machine that may be gone.
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(fd, "w") as out:
        out.write(who)
        out.flush()
        # Before anybody acts on the claim: a file server that loses power must not forget who won.
        os.fsync(fd)
    return True
