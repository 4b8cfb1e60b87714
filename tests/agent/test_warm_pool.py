"""Where workers come from, when the process that forks them is gone."""

import asyncio
import os
import signal

import pytest

from holdfast.agent.warm_pool import WarmPool, WarmProcess

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
        with pytest.raises(RuntimeError, match="no process to start a worker from"):
            await take_all(pool, taken)
        await end(pool, *taken)

    asyncio.run(take())
