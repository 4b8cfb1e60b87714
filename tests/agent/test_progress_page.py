"""The progress page: what one process writes another reads."""

import multiprocessing
import os

from holdfast.protocol.phases import Phase
from holdfast.protocol.progress_page import ProgressPage


def work(path):
    page = ProgressPage(path)
    page.generation, page.committed, page.waits_for = 3, 40, 1
    page.enter(Phase.BACKWARD)
    page.wait_for(2)
    page.close()


def test_what_the_worker_writes_its_agent_reads():
    page = ProgressPage()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(page.path,))
    worker.start()
    worker.join()
    worker.close()
    place = page.read()
    assert (place.generation, place.committed, place.phase, place.waits_for) == (3, 40, Phase.BACKWARD, 2)
    page.close()


def test_a_worker_may_write_on_when_its_agent_reads_no_more():
    before = os.listdir("/proc/self/fd")
    page = ProgressPage()
    worker = ProgressPage(page.path)
    page.close()
    worker.beat()
    assert worker.read().phase == Phase.STARTUP
    worker.close()
    assert os.listdir("/proc/self/fd") == before
