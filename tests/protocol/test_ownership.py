"""Nothing is taken from a folder or file that others can write to."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.hooks import Hooks, check_hooks
from holdfast.data.cache import Cache
from holdfast.engines.jobs import JobFolder
from holdfast.errors import UsageError
from holdfast.health.ruleset import load_rules
from holdfast.protocol.machine import ownership
from holdfast.protocol.machine.ownership import refuse_open_to_others

OTHERS = 12_345
"""A group that is nobody's own."""


def hooks(folder: Path) -> Path:
    (folder / "on-create").write_text("#!/bin/sh\n")
    (folder / "on-create").chmod(0o700)
    return folder / "on-create"


def of_another_group(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Stands for `chgrp`, which only root can do."""
    there = {os.path.realpath(path) for path in paths}
    look = Path.stat

    def seen(self: Path, **given: bool) -> os.stat_result:
        kind = look(self, **given)
        if os.path.realpath(self) not in there:
            return kind
        return os.stat_result((*kind[:5], OTHERS, *kind[6:]))

    monkeypatch.setattr(Path, "stat", seen)


def of_another_user(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    look = Path.stat

    def seen(self: Path, **given: bool) -> os.stat_result:
        kind = look(self, **given)
        return os.stat_result((*kind[:4], OTHERS, *kind[5:])) if self == path else kind

    monkeypatch.setattr(Path, "stat", seen)


def job(folder: Path) -> object:
    (folder / "jobs").mkdir(exist_ok=True)
    (folder / "jobs" / "llm").mkdir(exist_ok=True, mode=0o700)
    os.environ["HOLDFAST_HOME"] = str(folder)
    made = JobFolder("llm")
    made.close()
    return made


def rules(folder: Path) -> object:
    (folder / "rules.toml").touch()
    return load_rules([str(folder / "rules.toml")])


def hook(folder: Path) -> object:
    if not (folder / "on-create").exists():
        hooks(folder)
    return check_hooks(folder)


TAKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "job folder": (job, "jobs/llm"),
    "hooks": (hook, ""),
    "a hook": (hook, "on-create"),
    "rules": (rules, "rules.toml"),
    "data cache": (Cache, ""),
    "entries of a data cache": (Cache, "entries"),
}
"""What is taken, and the part of it that others can write to."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    (made := tmp_path / "mine").mkdir(mode=0o700)
    return made


@pytest.mark.parametrize("what", TAKEN)
def test_what_everybody_can_write_to_is_refused_by_name(folder: Path, what: str) -> None:
    take, part = TAKEN[what]
    take(folder)
    path = folder / part
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(UsageError, match=re.escape(f"{path}, which belongs to ")) as refused:
        take(folder)
    assert f"`chmod o-w {path}`" in str(refused.value)
    path.chmod(path.stat().st_mode & ~stat.S_IWOTH)
    take(folder)


@pytest.mark.parametrize("what", TAKEN)
def test_a_group_may_share_data_and_not_what_is_run(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, part = TAKEN[what]
    take(folder)
    path = folder / part
    path.chmod(path.stat().st_mode | stat.S_IWGRP)
    of_another_group(monkeypatch, path)
    if "data cache" in what:
        take(folder)
        return
    with pytest.raises(UsageError, match=f"every member of the group {OTHERS}") as refused:
        take(folder)
    assert f"`chmod g-w {path}`" in str(refused.value)


def test_a_group_that_is_this_users_alone_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As most systems make it, with a umask of 002."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o775)
    of_another_group(monkeypatch, tmp_path / "mine")
    for members, accepted in (([], True), (["me"], True), (["me", "another"], False)):
        group = ownership.grp.struct_group(("me", "x", OTHERS, members))
        user = ownership.pwd.struct_passwd(("me", "x", 1, OTHERS, "", "/", ""))
        monkeypatch.setattr(ownership.grp, "getgrgid", lambda gid, group=group: group)
        monkeypatch.setattr(ownership.pwd, "getpwuid", lambda uid, user=user: user)
        if accepted:
            refuse_open_to_others(tmp_path / "mine", "it")
        else:
            with pytest.raises(UsageError, match="every member of the group me"):
                refuse_open_to_others(tmp_path / "mine", "it")


def test_a_job_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(folder)
    of_another_user(monkeypatch, folder / "jobs" / "llm")
    with pytest.raises(UsageError, match=f"belongs to the user {OTHERS}"):
        job(folder)


def test_a_folder_above_in_which_everybody_could_exchange_it(tmp_path: Path) -> None:
    (above := tmp_path / "scratch").mkdir()
    (mine := above / "mine").mkdir(mode=0o700)
    above.chmod(0o777)
    with pytest.raises(UsageError, match=re.escape(f"because {above}, which belongs to ")):
        refuse_open_to_others(mine, "it")
    above.chmod(0o1777)  # as /tmp is
    refuse_open_to_others(mine, "it")
    above.chmod(0o2775)  # as a project's folder is
    refuse_open_to_others(mine, "it")


def test_a_link_counts_for_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    (tmp_path / "link").symlink_to("theirs")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "theirs"))):
        refuse_open_to_others(tmp_path / "link", "it")


def test_what_is_mounted_to_be_read_has_any_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the volumes of Kubernetes are."""
    tmp_path.chmod(0o777)
    look = os.statvfs

    def read_only(path: Path) -> os.statvfs_result:
        return os.statvfs_result((*look(path)[:8], os.ST_RDONLY, 255))

    monkeypatch.setattr(os, "statvfs", read_only)
    refuse_open_to_others(tmp_path, "it")


def test_a_hook_that_others_can_write_to_by_now_is_not_run(tmp_path: Path) -> None:
    (folder := tmp_path / "hooks").mkdir(mode=0o700)
    script = hooks(folder)
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o702)
    ran = asyncio.run(Hooks(str(folder), "job", "node0", tmp_path).run("on-create", ""))
    assert ran is not None
    assert ran.error.startswith("it is not run: ")
    assert not (tmp_path / "ran").exists()
    script.chmod(0o700)
    ran = asyncio.run(Hooks(str(folder), "job", "node0", tmp_path).run("on-create", ""))
    assert ran is not None
    assert (ran.error, (tmp_path / "ran").exists()) == ("", True)


def test_in_a_pod_volumes_have_any_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    (volume / "jobs").mkdir(parents=True, mode=0o700)
    volume.chmod(0o777)  # as the kubelet makes an emptyDir
    with pytest.raises(UsageError, match="is writable by all"):
        refuse_open_to_others(volume / "jobs", "the job's folder")
    monkeypatch.setenv(ownership.IN_A_POD, "10.96.0.1")
    refuse_open_to_others(volume / "jobs", "the job's folder")
