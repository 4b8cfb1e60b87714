"""A job of two workers that trains with one for a while, because somebody asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from between import PIPES
from drive import Deed, Driver, Gate, newcomer, resize
from ends import LIMIT_S
from harness import Ran, finish, start, wait_for

FIRST, SECOND = 4, 10
"""Workers wait after FIRST steps until they are asked to be one, and after SECOND until a newcomer is ready. So no machine is
too slow for the job to have had both sizes in the middle of an epoch."""


def sizes(ran: Ran) -> list[int]:
    return [world for _, world in ran.report["world"]["history"]]


def check(ran: Ran, *worlds: int) -> None:
    """It ended well, with all protected state equal: so also where loops and callbacks stand. worlds: its first sizes."""
    assert ran.code == 0, ran.output
    assert ran.report["final"]["replicas_equal"], ran.output
    assert sizes(ran)[: len(worlds)] == [*worlds]


def smaller_and_whole_again(home: Path, monkeypatch: pytest.MonkeyPatch, *script: object) -> Ran:
    (home / "gates").mkdir()
    gates = {steps: Gate(home / "gates" / str(steps)) for steps in (FIRST, SECOND)}
    monkeypatch.setenv(PIPES, str(home / "gates"))
    # Workers that wait are no hang: by default a standstill is found after a multiple of a step's time.
    process = start(home, "--nnodes", "1:2", "--detection", 600, *script)
    wait_for(process, "waiting for nodes")  # the job's folder is there
    deeds = [
        Deed(resize(1), 1, 2),
        Deed(gates[FIRST].open(), 0),  # of either size: it may have been one worker when it came there
        Deed(resize(2), 1, 1),
        Deed(gates[SECOND].open(), 0, 1, when=newcomer),
    ]
    with Driver(home / "jobs" / "job", deeds) as driver:
        ran = finish(process, home, timeout=LIMIT_S)
    for gate in gates.values():
        gate.close()
    assert not driver.left, ran.output[-3000:]
    check(ran)
    assert sizes(ran) == [2, 1, 2]
    assert ran.report["incidents"] == []
    return ran
