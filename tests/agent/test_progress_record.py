"""The progress record: what one process writes another reads."""

import multiprocessing
import os
import time

import pytest

from holdfast.agent.process import Standstill, waited_for_processor_s
from holdfast.protocol.machine.progress_record import ProgressRecord
from holdfast.protocol.phases import Phase


def work(path):
    record = ProgressRecord(path)
    record.generation, record.committed, record.waits_for = 3, 40, 1
    record.enter(Phase.BACKWARD)
    record.wait_for(2)
    record.close()


def test_what_the_worker_writes_its_agent_reads():
    record = ProgressRecord()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(record.path,))
    worker.start()
    worker.join()
    worker.close()
    place = record.read()
    assert (place.generation, place.committed, place.phase, place.waits_for) == (3, 40, Phase.BACKWARD, 2)
    record.close()


def test_a_worker_may_write_on_when_its_agent_reads_no_more():
    before = os.listdir("/proc/self/fd")
    record = ProgressRecord()
    worker = ProgressRecord(record.path)
    record.close()
    worker.beat()
    assert worker.read().phase == Phase.STARTUP
    worker.close()
    assert os.listdir("/proc/self/fd") == before


def test_who_waits_for_a_processor_does_not_stand_still():
    seen = Standstill()
    assert seen.idle_s(0.0, 0.0, 10.0) == 0.0  # it has not begun
    assert seen.idle_s(10.0, 0.1, 10.5) == pytest.approx(0.4)
    assert seen.idle_s(10.0, 0.9, 11.5) == pytest.approx(0.6)
    assert seen.idle_s(11.6, 0.9, 12.6) == pytest.approx(1.0)  # it moved, and has waited for nothing since
    assert seen.idle_s(11.6, 1.9, 13.6) == pytest.approx(1.0)
    assert seen.idle_s(11.6, 1.9, 14.6) == pytest.approx(2.0)


def test_what_a_process_waits_for_is_read():
    assert 0.0 <= waited_for_processor_s(os.getpid()) < time.monotonic()
    assert waited_for_processor_s(2**22 + 1) == 0.0  # there is none
