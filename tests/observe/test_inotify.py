import asyncio
import ctypes
import errno

import pytest

from holdfast.observe import inotify


class Exhausted:
    """The C library of a user who has no inotify instance left."""

    def __init__(self, number):
        self._number = number

    def inotify_init1(self, flags):
        ctypes.set_errno(self._number)
        return -1

    def inotify_add_watch(self, fd, path, events):
        return -1

    def inotify_rm_watch(self, fd, watch):
        return -1


def watch(path):
    async def main():
        seen = asyncio.Event()
        watcher = inotify.Inotify(seen.set)
        number = watcher.watch(path)
        path.write_text("more")
        await asyncio.wait_for(seen.wait(), 20)
        watcher.forget(number)
        watcher.close()

    asyncio.run(main())


def test_a_change_is_an_event(tmp_path):
    (tmp_path / "log").touch()
    watch(tmp_path / "log")


def test_without_an_instance_it_looks_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(inotify.ctypes, "CDLL", lambda *a, **k: Exhausted(errno.EMFILE))
    monkeypatch.setattr(inotify, "WITHOUT_S", 0.01)
    watch(tmp_path / "log")


def test_a_kernel_without_inotify_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(inotify.ctypes, "CDLL", lambda *a, **k: Exhausted(errno.ENOSYS))
    with pytest.raises(OSError, match="inotify"):
        watch(tmp_path / "log")
