"""What scripts log: the newest value of each name, rows in the ledger, and bounds."""

import math
import sqlite3

import msgspec
import pytest
import torch
from desk import running

import holdfast as hf
from holdfast.agent.coordinator_link import Outbox
from holdfast.coordinator.service.job_view import build_report, build_status
from holdfast.coordinator.service.metrics import metrics_text
from holdfast.coordinator.service.store import LedgerBatch, ReportedSteps, Store
from holdfast.coordinator.service.tally import StepSummary, Tally
from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.job_view import Logged


def tell(desk, step, generation=None, **values):
    number = desk.state.membership.number if generation is None else generation
    desk.says(
        desk.members()[0],
        m.Progress(generation=number, committed=step + 1, median_s=0.1, figures=((step, values),)),
    )


def test_the_newest_value_of_each_name_is_shown_everywhere():
    desk = running(2)
    tell(desk, 3, accuracy=0.5, lr=1.0)
    tell(desk, 4, accuracy=0.75, bad=math.nan, far=math.inf)
    shown = build_status(desk.state, desk.now).figures
    assert shown["accuracy"] == Logged(step=4, value=0.75)
    assert shown["lr"] == Logged(step=3, value=1.0)
    report = msgspec.json.decode(msgspec.json.encode(build_report(desk.state, StepSummary(), desk.now)))
    assert report["figures"]["bad"] == report["figures"]["far"] == {"step": 4, "value": None}
    text = metrics_text(desk.state, Tally(), desk.now).decode()
    assert 'holdfast_run_value{name="accuracy"} 0.75' in text
    assert 'holdfast_run_value{name="bad"} NaN' in text
    desk.crash()
    assert build_status(desk.state, desk.now).figures["accuracy"] == Logged(step=4, value=0.75)


def test_a_late_word_of_an_older_generation_changes_nothing_and_a_step_computed_again_does():
    desk = running(2)
    tell(desk, 9, accuracy=0.5)
    tell(desk, 5, generation=desk.state.membership.number - 1, accuracy=0.1)
    assert desk.state.membership.figures["accuracy"] == (9, 0.5)
    tell(desk, 6, accuracy=0.2)  # the job went back to a snapshot
    assert desk.state.membership.figures["accuracy"] == (6, 0.2)


def test_names_do_not_grow_for_ever():
    desk = running(2)
    for number in range(m.MOST_FIGURES + 9):
        tell(desk, number, **{f"name{number}": 1.0})
    tell(desk, 99, name0=2.0, **{"x" * (m.FIGURE_NAME + 1): 1.0})
    assert len(desk.state.membership.figures) == m.MOST_FIGURES
    assert desk.state.membership.figures["name0"] == (99, 2.0)


def test_a_value_that_is_told_again_is_one_row(tmp_path):
    store = Store(tmp_path / "job.sqlite")
    store.write(
        LedgerBatch(
            steps=[
                ReportedSteps(
                    t_s=1.0,
                    losses=(),
                    generation=2,
                    world=3,
                    figures=(("a", 0, 1.0), ("a", 1, 2.0), ("b", 1, math.nan)),
                )
            ]
        )
    )
    store.write(
        LedgerBatch(
            steps=[ReportedSteps(t_s=2.0, losses=(), generation=2, world=3, figures=(("a", 1, 2.0),))]
        )
    )
    store.write(
        LedgerBatch(
            steps=[ReportedSteps(t_s=2.0, losses=(), generation=1, world=3, figures=(("a", 1, 7.0),))]
        )
    )  # a late word
    assert store.figures("a") == [(0, 1.0), (1, 2.0)]
    store.write(
        LedgerBatch(
            steps=[ReportedSteps(t_s=3.0, losses=(), generation=3, world=3, figures=(("a", 1, 5.0),))]
        )
    )  # computed again
    assert store.figures("a") == [(0, 1.0), (1, 5.0)]
    assert store.figures("b") == [(1, None)]
    store.close()


def test_a_ledger_from_before_there_were_figures_can_be_read(tmp_path):
    path = tmp_path / "job.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("drop table figures")
    db.close()
    old = Store(path, read_only=True)
    assert old.figures("a") == []
    assert old.steps() == []
    old.close()


def test_an_agent_tells_them_again_after_a_lost_connection():
    outbox = Outbox(kept=16, repeated=8)
    said = m.FromWorker("w", m.Progress(generation=1, committed=3, median_s=0.1, figures=((2, {"a": 1.0}),)))
    outbox.put(said, 0.0)
    outbox.sent(outbox.take())
    outbox.repeat()
    assert outbox.take().message == said


def log(**values):
    """A job of one that logs these in its first step."""

    def main(run):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for step in run.steps([torch.ones(1)] * 8, global_batch=2, micro_batch=2, until=1):
            with step:
                for x in step:
                    step.backward(model(x).sum(), weight=2)
                step.apply(optimizer)
            run.log(**values)

    hf.start(main)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({f"x{i}": 1.0 for i in range(65)}, "at most 64 names"),
        ({"x" * 65: 1.0}, r"run\.log\(xxxxxxxxxxxxxxxxxxxx…\): at most 64 names of 64 characters"),
        ({"x": "high"}, r"run\.log\(\): .*pass numbers"),
        ({"x": torch.ones(2)}, r"run\.log\(\): .*pass numbers"),
    ],
)
def test_what_cannot_be_logged_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        log(**values)


def test_what_can_be_logged():
    log(loss=torch.ones(1), n=3, bad=math.inf, **{"train/accuracy": 0.5})
