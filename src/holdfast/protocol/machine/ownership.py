"""Whether others can change what a process takes its orders, its code or its data from: folders and files that they can write to,
or put others in the place of."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from holdfast.errors import UsageError

_ROOT = 0
IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""The kubelet gives it to every container."""


def refuse_open_to_others(path: Path, what: str, *, group: bool = False, owner: bool = True) -> None:
    """Refuses a folder or file that anybody but this user and root can write to, or exchange.

    In a pod of Kubernetes nothing is refused: everybody there is one of the pod's own containers, its volumes have any mode,
    and the cluster decides who may mount one.

    Args:
        path: of a folder or file; links are followed.
        what: it is, with its option: begins the message.
        group: members of its group may write to it: what is taken from it is data, and shared on purpose.
        owner: it must not belong to anybody else, who could change its mode.

    Raises:
        UsageError: they can; the message has the path, its owner and what to do.
        OSError: it cannot be looked at.
    """
    if IN_A_POD in os.environ:
        return
    path = path.resolve()
    # Nobody can write to what is mounted to be read.
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    kind = path.stat()
    if owner and kind.st_uid not in (os.getuid(), _ROOT):
        raise UsageError(
            f"{what} {path} belongs to {_user(kind.st_uid)}, who could change its content: choose one that belongs "
            "to you"
        )
    if kind.st_mode & stat.S_IWOTH:
        raise _refusal(what, path, kind, "everybody", "o-w")
    if kind.st_mode & stat.S_IWGRP and not group and not _is_private(kind.st_gid):
        raise _refusal(what, path, kind, f"every member of the group {_group(kind.st_gid)}", "g-w")
    if (above := exchangeable_in(path)) is not None:
        kind = above.stat()
        raise UsageError(
            f"every user could replace {what} {path}, because {above}, which belongs to {_user(kind.st_uid)}, is "
            f"writable by all: `chmod o-w {above}` or `chmod +t {above}`, or choose another path"
        )


def exchangeable_in(path: Path) -> Path | None:
    """The folder above in which everybody could put another in the place of this; None: there is none.

    A sticky folder of root's, as /tmp is, lets nobody rename what is another's; of any other user's folder its owner can.
    """
    # A folder of a project may belong to anybody and be open to its group: those who share it trust each other so far, and
    # what they put there is theirs, which is refused for its owner.
    for above in path.parents:
        kind = above.stat()
        kept = kind.st_mode & stat.S_ISVTX and kind.st_uid in (os.getuid(), _ROOT)
        if kind.st_mode & stat.S_IWOTH and not kept:
            return above
    return None


def _refusal(what: str, path: Path, kind: os.stat_result, who: str, change: str) -> UsageError:
    return UsageError(
        f"{what} {path}, which belongs to {_user(kind.st_uid)}, can be written by {who}: `chmod {change} {path}` "
        "after you have checked that nobody has changed it, or choose another path"
    )


def _is_private(gid: int) -> bool:
    """Whether a group is root's or this user's alone, as most systems make one for each user."""
    if gid == _ROOT:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
