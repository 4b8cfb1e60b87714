"""Where workers come from, when the process that forks them is gone."""

import asyncio
import os
import signal

import pytest

from holdfast.agent.warm_pool import WarmPool, WarmProcess
from holdfast.protocol import messages as m

WAIT_S = 90
"""A new zygote imports torch first; beside other tests that takes many times as long."""


async def end(pool: WarmPool, *taken: WarmProcess) -> None:
    for process in taken:
        process.writer.close()  # it ends then
        await process.writer.wait_closed()
    await pool.close()


async def take_all(pool: WarmPool, taken: list[WarmProcess]) -> None:
    """One or two may be warm still."""
    while True:
        taken.append(await asyncio.wait_for(pool.take(), WAIT_S))


def test_a_zygote_that_was_ended_is_started_again() -> None:
    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        assert pool._zygote is not None
        first = await asyncio.wait_for(pool.take(), WAIT_S)
        os.kill(pool._zygote.pid, signal.SIGKILL)
        others = [await asyncio.wait_for(pool.take(), WAIT_S) for _ in range(3)]
        await end(pool, first, *others)

    asyncio.run(take())


def test_whoever_waits_hears_that_no_zygote_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        assert pool._zygote is not None
        first = await asyncio.wait_for(pool.take(), WAIT_S)
        second = await asyncio.wait_for(pool.take(), WAIT_S)
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        os.kill(pool._zygote.pid, signal.SIGKILL)
        taken = [first, second]
        with pytest.raises(RuntimeError, match="the process from which workers are started failed"):
            await take_all(pool, taken)
        await end(pool, *taken)

    asyncio.run(take())


def imports(tmp_path, *modules: str, **order: tuple[str, ...]) -> m.Preload:
    return m.Preload(modules=modules, cwd=str(tmp_path), **order)


async def made(pool: WarmPool) -> None:
    """Waits until no process imports any more."""
    assert pool._importing is not None
    await asyncio.wait_for(asyncio.shield(pool._importing), WAIT_S)


def test_a_process_that_has_imported_what_the_script_needs_is_taken_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "heavy.py").write_text(
        "import os, pathlib\npathlib.Path(f'imported-{os.getpid()}').touch()\n"
    )

    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        pool.learn(imports(tmp_path, "heavy"))
        await made(pool)
        first = await asyncio.wait_for(pool.take(), WAIT_S)
        assert [p.name for p in tmp_path.glob("imported-*")] == [f"imported-{first.pid}"]
        # Not before the start of the worker is over: the agent says when.
        second = await asyncio.wait_for(pool.take(), WAIT_S)
        assert len([*tmp_path.glob("imported-*")]) == 1
        pool.import_ahead()
        await made(pool)
        third = await asyncio.wait_for(pool.take(), WAIT_S)
        assert (tmp_path / f"imported-{third.pid}").exists()
        await end(pool, first, second, third)

    asyncio.run(take())


def test_what_may_have_read_a_variable_that_matters_now_is_not_taken(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "heavy.py").write_text(
        "import os, pathlib\npathlib.Path(f'imported-{os.getpid()}').touch()\n"
    )

    def importers() -> set[str]:
        return {path.name for path in tmp_path.glob("imported-*")}

    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        pool.learn(imports(tmp_path, "heavy"))
        await made(pool)
        before = importers()
        pool.learn(imports(tmp_path, "heavy", variables=("HF_HOME",)))
        await made(pool)
        # Where only a module is added, the process that has the others is as good as it was.
        pool.learn(imports(tmp_path, "heavy", "json.tool", variables=("HF_HOME",)))
        await made(pool)
        first = await asyncio.wait_for(pool.take(), WAIT_S)
        assert importers() - before == {f"imported-{first.pid}"}
        await end(pool, first)

    asyncio.run(take())


def test_an_import_that_hangs_keeps_nobody_from_starting(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    os.mkfifo(tmp_path / "never")
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "hangs.py").write_text("open('begun', 'w').close()\nopen('never').read()\n")

    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        pool.learn(imports(tmp_path, "hangs"))
        await asyncio.to_thread((tmp_path / "begun").read_bytes)
        taken = [await asyncio.wait_for(pool.take(), WAIT_S) for _ in range(2)]
        assert pool._importing is not None
        assert not pool._importing.done()
        os.close(os.open(tmp_path / "never", os.O_RDWR))  # let it end
        await end(pool, *taken)

    asyncio.run(take())


def test_what_cannot_be_imported_ahead_is_left_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "reads.py").write_text("import os\nos.environ.get('RANK')\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)\n")
    (tmp_path / "good.py").write_text("import os, pathlib\npathlib.Path(str(os.getpid())).touch()\n")

    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        pool.learn(imports(tmp_path, "reads", "good", variables=("RANK",)))
        await made(pool)
        first = await asyncio.wait_for(pool.take(), WAIT_S)
        assert (tmp_path / str(first.pid)).exists()
        # What ends its process is given up after a few; workers come from others.
        pool.learn(imports(tmp_path, "good", "ends"))
        await made(pool)
        second = await asyncio.wait_for(pool.take(), WAIT_S)
        assert not (tmp_path / str(second.pid)).exists()
        await end(pool, first, second)

    asyncio.run(take())


def test_nothing_is_imported_ahead_where_memory_is_short(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.agent.warm_pool.available_bytes", lambda: 1 << 30)

    async def take() -> None:
        pool = WarmPool(1, ("holdfast.train.worker",))
        await pool.start()
        pool.learn(imports(tmp_path, "json.tool"))
        await made(pool)
        assert not pool._imported
        await pool.close()

    asyncio.run(take())
