"""What a worker says of an error that its script ends by."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

from holdfast.errors import StateError, UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.tensors import loaded
from holdfast.train import worker

REFUSAL = "the checkpoint is of other objects"


class Listens:
    """Stands for the link to the agent."""

    def __init__(self) -> None:
        self.failed = False
        self.record = SimpleNamespace(phase=Phase.STARTUP)
        self.said: list[Any] = []

    def send(self, message: m.WorkerMessage) -> None:
        self.said.append(message)


def said_of(error: BaseException) -> m.Failed:
    link = Listens()
    worker._report(error, link)  # type: ignore[arg-type]
    assert link.failed
    (failed,) = link.said
    assert isinstance(failed, m.Failed)
    return failed


def raised(refuses: bool) -> BaseException:
    """As it comes out of a script that calls Holdfast."""
    try:
        try:
            loaded.load("model", object(), {}, ())  # raises deep in Holdfast
        except Exception as first:
            if refuses:
                raise UsageError(REFUSAL) from first
            raise StateError("the state is damaged") from first
    except Exception as error:
        # Its first frame is `_run_script`'s.
        return error.with_traceback(_in_frame(error))
    raise AssertionError


def _in_frame(error: BaseException) -> Any:
    trace = error.__traceback__
    assert trace is not None
    return type(trace)(trace, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def test_a_refusal_names_the_line_of_the_script_and_says_its_words_once() -> None:
    failed = said_of(raised(refuses=True))
    assert failed.refused
    assert failed.where.startswith("test_worker_errors.py:")
    assert failed.traceback.count(REFUSAL) == 1
    assert failed.traceback.count("Traceback") == 1
    assert "holdfast/tensors" not in failed.traceback


def test_any_other_error_has_its_whole_traceback() -> None:
    error = raised(refuses=False)
    failed = said_of(error)
    assert not failed.refused
    assert failed.traceback.count("Traceback") == 2
    assert "holdfast/tensors" in failed.traceback
    assert failed.traceback.splitlines()[-1] == traceback.format_exception_only(error)[-1].strip()
