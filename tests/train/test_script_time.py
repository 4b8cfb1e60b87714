"""For how long the script has a worker between two steps: measured by the worker, told with each commit."""

import time
from functools import partial
from types import SimpleNamespace

import torch

import holdfast as hf
from holdfast.protocol import messages as m
from holdfast.train import step_report


class Clock:
    """Moves by hand."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = staticmethod(time.monotonic)


def tells(told, send, message):
    if isinstance(message, m.Progress):
        told.append(message)
    send(message)


def test_what_the_script_does_between_steps_and_does_not_announce(monkeypatch):
    clock, told = Clock(), []
    monkeypatch.setattr(step_report, "time", clock)

    def main(run):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps([torch.ones(1)] * 8, global_batch=2, micro_batch=2, until=4):
            link = run._replica.link
            if not told:
                monkeypatch.setattr(link, "send", partial(tells, told, link.send))
                monkeypatch.setattr("holdfast.train.step_report.PROGRESS_EVERY_S", 0.0)
            clock.now += 0.5  # before the step
            with step:
                clock.now += 10.0  # the step itself is no time of the script's own
                for x in step:
                    step.backward(model(x).sum(), weight=2)
                step.apply(optimizer)
            clock.now += 1.0
            with run.relaxed_watchdog():
                clock.now += 100.0  # the coordinator hears when it begins and ends
            clock.now += 2.0

    hf.start(main)
    assert [word.script_s for word in told] == [0.5, 4.0, 7.5, 11.0]


def test_another_generation_counts_from_its_beginning(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_report, "time", clock)
    report = step_report.PhaseReport(SimpleNamespace(record=None), None)
    report.leave()
    clock.now = 3.0
    report.take()
    report.take()  # nothing is under way
    assert report.script_s == 3.0
    report.forget()
    assert report.script_s == 0.0
