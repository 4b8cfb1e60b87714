"""One coordinator at a time, for as long as the job lives."""

import asyncio
import signal

import pytest

from holdfast.engines.coordinator_keeper import CoordinatorConfig, CoordinatorKeeper, Superseded, listen
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job_options import Timing


class Process:
    """A coordinator that ends with a code, or by a signal."""

    pid = 1  # whose /proc entry can be read

    def __init__(self, code):
        self.returncode, self._code, self.signals = None, code, []
        self._signalled = asyncio.Event()

    async def wait(self):
        if self._code is None:
            await self._signalled.wait()
        self.returncode = self._code if self._code is not None else -int(self.signals[0])
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)
        self._signalled.set()


class Job:
    """Its coordinators end with these codes, one after the other; None: when they are signalled."""

    def __init__(self, tmp_path, monkeypatch, *codes, lifeline=None):
        self.processes, self.commands, self.notes = [], [], []
        codes = list(codes)

        async def start(*command, **more):
            self.commands.append((command, more))
            self.processes.append(Process(codes.pop(0)))
            return self.processes[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        config = CoordinatorConfig(
            job_dir=tmp_path,
            timing=Timing(),
            host="127.0.0.1",
            listener=listen("127.0.0.1", 0),
            term=3,
            lifeline=lifeline,
        )
        self.begun = 0
        self.keeper = CoordinatorKeeper(config, lambda text, **more: self.notes.append(text), self.on_start)

    def on_start(self):
        self.begun += 1

    def run(self, meanwhile=None):
        async def keep():
            try:
                await self.keeper.start()
                keeping = asyncio.create_task(self.keeper.keep())
                if meanwhile is not None:
                    meanwhile()
                await keeping
            finally:
                await self.keeper.close()

        asyncio.run(keep())
        return self


def test_a_coordinator_that_hands_over_is_followed_as_often_as_it_does(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, *[75] * 5, 0).run()
    assert job.begun == 6
    assert all("hands over" in note for note in job.notes)


def test_one_that_fails_is_not_started_for_ever_and_a_successor_s_is_left_alone(tmp_path, monkeypatch):
    with pytest.raises(HoldfastError, match="3 times"):
        Job(tmp_path, monkeypatch, 1, 1, 1).run()
    assert Job(tmp_path, monkeypatch, 1, 1, 75, 1, 1, 0).run().begun == 6
    assert Job(tmp_path, monkeypatch, -9, -9, -9, -9, 0).run().begun == 5
    with pytest.raises(Superseded):
        Job(tmp_path, monkeypatch, 4).run()


def test_one_that_is_asked_to_go_is_not_followed(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, None)
    job.run(job.keeper.hand_over)
    assert (job.begun, job.processes[0].signals) == (1, [signal.SIGTERM])
    job = Job(tmp_path, monkeypatch, None)
    job.run(job.keeper.end_now)
    assert (job.begun, job.processes[0].signals) == (1, [signal.SIGKILL])


def test_one_that_is_being_started_hears_it_too(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, None)
    job.keeper.end_now()
    assert job.run().processes[0].signals == [signal.SIGKILL]


def test_a_job_may_outlive_its_launcher(tmp_path, monkeypatch):
    """A pipe that ends tells a coordinator to end its job."""
    command, more = Job(tmp_path, monkeypatch, 0).run().commands[0]
    assert not [word for word in command if "lifeline" in word]
    assert "--term=3" in command
    command, more = Job(tmp_path, monkeypatch, 0, lifeline=7).run().commands[0]
    assert "--lifeline=7" in command
    assert 7 in more["pass_fds"]


def test_a_port_that_is_in_use_is_the_user_s_to_choose(tmp_path):
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError, match="choose another --port"):
        listen("127.0.0.1", taken.getsockname()[1])
