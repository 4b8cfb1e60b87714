"""One coordinator at a time, for as long as the job lives."""

import asyncio
import errno
import os
import signal

import pytest

import holdfast
from holdfast.engines import coordinator_supervisor
from holdfast.engines.coordinator_supervisor import (
    CoordinatorConfig,
    CoordinatorSupervisor,
    LauncherSuperseded,
    listen,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job_options import Timing
from holdfast.protocol.leadership import EXIT_NO_ROOM, EXIT_OTHER_VERSION


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

    def __init__(self, tmp_path, monkeypatch, *codes, lifeline=None, files=None):
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
            files=files or {},
        )
        self.begun = 0
        self.supervisor = CoordinatorSupervisor(
            config, lambda text, **more: self.notes.append(text), self.on_start
        )

    def on_start(self):
        self.begun += 1

    def run(self, meanwhile=None):
        async def keep():
            try:
                await self.supervisor.start()
                keeping = asyncio.create_task(self.supervisor.keep())
                if meanwhile is not None:
                    meanwhile()
                await keeping
            finally:
                await self.supervisor.close()

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
    with pytest.raises(LauncherSuperseded):
        Job(tmp_path, monkeypatch, 4).run()


def test_one_that_is_asked_to_go_is_not_followed(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, None)
    job.run(job.supervisor.hand_over)
    assert (job.begun, job.processes[0].signals) == (1, [signal.SIGTERM])
    job = Job(tmp_path, monkeypatch, None)
    job.run(job.supervisor.end_now)
    assert (job.begun, job.processes[0].signals) == (1, [signal.SIGKILL])


def test_one_that_is_being_started_hears_it_too(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, None)
    job.supervisor.end_now()
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
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError, match="choose another port"):
        listen("127.0.0.1", taken.getsockname()[1])


def without_pauses(job):
    """Its pauses are noted and not made."""
    job.pauses = []

    async def sleep(seconds):
        job.pauses.append(seconds)

    job.supervisor._sleep = sleep
    return job


def test_a_full_disk_is_waited_for_as_long_as_it_takes_and_told_once(tmp_path, monkeypatch):
    job = without_pauses(Job(tmp_path, monkeypatch, *[EXIT_NO_ROOM] * 20, 0)).run()
    assert job.pauses == [1.0, 2.0] + [5.0] * 18
    (note,) = job.notes
    assert "the system refuses a resource that it needs" in note
    # With other ends in between, three in a row are still too many.
    with pytest.raises(HoldfastError, match="ended 3 times with exit code 1"):
        without_pauses(Job(tmp_path, monkeypatch, EXIT_NO_ROOM, 1, EXIT_NO_ROOM, 1, 1, 1)).run()


def test_no_process_for_it_is_waited_for_too(tmp_path, monkeypatch):
    job = without_pauses(Job(tmp_path, monkeypatch, -9, 0))
    start, refusals = asyncio.create_subprocess_exec, [errno.EAGAIN, errno.ENOMEM, errno.EMFILE]

    async def scarce(*command, **more):
        if job.processes and refusals:
            raise OSError(refusals.pop(), "not now")
        return await start(*command, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    job.run()
    assert (job.begun, job.pauses) == (2, [1.0, 2.0, 5.0])
    assert job.notes[1].startswith(
        "the job has no coordinator: the system refuses a resource that it needs (it cannot be started: not now)"
    )


def test_all_of_a_job_have_one_name(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, -9, 0).run()
    names = [[word for word in command if str(word).startswith("--instance=")] for command, _ in job.commands]
    assert names[0] == names[1] != []


def test_a_file_that_is_gone_is_put_back_for_its_owner_alone(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, -9, 0, files={"token": b"secret", "spec.json": b"{}"})
    (tmp_path / "spec.json").write_bytes(b'"another"')
    job.run()
    assert (tmp_path / "token").read_bytes() == b"secret"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "spec.json").read_bytes() == b'"another"'
    assert job.notes[0] == f"{tmp_path / 'token'} was missing and has been restored"


@pytest.mark.parametrize("name", ["token", "identity", "spec.json", "resume.json"])
@pytest.mark.parametrize("there", [b"", b"\xff\xfe\x00", b"\0" * 32, b"{ torn"])
def test_a_file_that_is_damaged_is_put_back(tmp_path, monkeypatch, name, there):
    known = b"{}" if name.endswith("json") else b"secret"
    job = Job(tmp_path, monkeypatch, -9, 0, files={name: known})
    (tmp_path / name).write_bytes(there)
    job.run()
    assert (tmp_path / name).read_bytes() == known
    assert job.notes[0] == f"{tmp_path / name} was damaged and has been restored"


def test_a_token_that_is_another_is_one_of_a_later_start(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, -9, 0, files={"token": b"secret"})
    (tmp_path / "token").write_bytes(b"another")
    job.run()
    assert (tmp_path / "token").read_bytes() == b"another"


def test_what_cannot_be_put_back_is_told(tmp_path, monkeypatch):
    (tmp_path / "folder").write_text("")
    job = Job(tmp_path, monkeypatch, 0, files={"folder/token": b"secret"}).run()
    assert job.notes == [f"{tmp_path / 'folder/token'} is missing and cannot be restored: File exists"]


class Waits:
    """Coordinators of which one serves and the next one waits: real pipes, and no processes."""

    def __init__(self, job, monkeypatch):
        self.job, self.gates, self.came = job, {}, asyncio.Event()
        start = asyncio.create_subprocess_exec
        monkeypatch.setattr(coordinator_supervisor, "STANDBY_S", 0)

        async def started(*command, **more):
            process = await start(*command, **more)
            for word in command:
                if word.startswith("--gate="):
                    # As its own, for the supervisor closes its copy.
                    self.gates[process] = os.dup(int(word.partition("=")[2]))
                    self.came.set()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)

    async def until(self, count):
        while len(self.gates) < count:
            self.came.clear()
            await self.came.wait()


def test_the_next_one_waits_beside_it_and_is_let_in_when_it_is_lost(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, None, None, None)
    waits = Waits(job, monkeypatch)

    async def keep():
        await job.supervisor.start()
        keeping = asyncio.create_task(job.supervisor.keep())
        await waits.until(1)
        (second,) = waits.gates
        os.set_blocking(waits.gates[second], False)
        with pytest.raises(BlockingIOError):
            os.read(waits.gates[second], 1)
        job.processes[0].send_signal(signal.SIGKILL)
        await waits.until(2)
        assert os.read(waits.gates[second], 1) == b"!"
        third = job.processes[2]
        assert job.begun == 2
        # The end of the job, while the third one waits: it is told to end, and did not serve.
        job.supervisor.hand_over()
        await keeping
        third.send_signal(signal.SIGTERM)
        await job.supervisor.close()
        assert os.read(waits.gates[third], 1) == b""
        for gate in waits.gates.values():
            os.close(gate)

    asyncio.run(keep())
    assert (job.begun, len(job.processes)) == (2, 3)


def test_one_of_another_version_waits_for_nothing_and_a_person_is_told_once(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, None, *[EXIT_OTHER_VERSION] * 3, None)
    waits = Waits(job, monkeypatch)

    async def keep():
        await job.supervisor.start()
        keeping = asyncio.create_task(job.supervisor.keep())
        await waits.until(4)
        job.supervisor.end_now()
        await keeping
        job.processes[-1].send_signal(signal.SIGTERM)
        await job.supervisor.close()

    asyncio.run(keep())
    (note,) = job.notes
    assert note.startswith("the version of Holdfast that is now installed here differs")
    assert f"install version {holdfast.__version__} again" in note


def test_without_one_that_waits_another_version_is_waited_for_like_a_full_disk(tmp_path, monkeypatch):
    job = without_pauses(Job(tmp_path, monkeypatch, -9, *[EXIT_OTHER_VERSION] * 9, 0)).run()
    assert job.pauses == [1.0, 2.0] + [5.0] * 7
    assert len(job.notes) == 2
    assert "Workers continue to train for 60 s" in job.notes[1]
