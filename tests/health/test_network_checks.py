"""Checks between nodes, on the loopback address."""

import json
import socket
import subprocess
import sys
import threading

import pytest

from holdfast.health.checks import pairs
from holdfast.health.checks.check import Task, attempt
from holdfast.health.checks.pairs import Measured
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.messages import Peer
from holdfast.tools.checks import network

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def pair(seconds: float = 0.05, token: str = "t") -> list[CheckResult]:
    port = free_port()
    listening = Task(node="a", host=HOST, seconds=seconds, port=port, peers=(Peer("b", HOST, 0),), token="t")
    thread = threading.Thread(target=lambda: attempt("pair", network.check_pair, listening))
    thread.start()
    try:
        connecting = Task(node="b", host=HOST, seconds=seconds, peers=(Peer("a", HOST, port),), token=token)
        return attempt("pair", network.check_pair, connecting)
    finally:
        thread.join()


def test_loopback():
    (result,) = network.check_loopback(Task(seconds=0.1))
    assert result.condition is Condition.HEALTHY
    assert result.value > 0.01


def test_a_pair_measures_both_ways():
    rate, latency = pair()
    assert (rate.name, rate.condition, rate.with_node) == ("pair", Condition.HEALTHY, "a")
    measured = pairs.measured_of([rate, latency])
    assert measured.bytes_per_s == pytest.approx(rate.value * 1e9)
    assert 0 < measured.latency_s < 1
    assert not measured.damaged


def test_one_without_the_token_is_turned_away(monkeypatch):
    monkeypatch.setattr(network, "MEET_S", 0.2)
    (result,) = pair(token="another")
    assert result.condition is Condition.FAULTY
    assert result.value == 0.0  # closed or reset, as it comes


def test_nobody_there(monkeypatch):
    monkeypatch.setattr(network, "MEET_S", 0.1)
    task = Task(node="b", host=HOST, peers=(Peer("a", HOST, free_port()),))
    (result,) = attempt("pair", network.check_pair, task)
    assert (result.condition, result.value) == (Condition.FAULTY, 0.0)
    assert pairs.measured_of([result]) == Measured(0.0, why=result.detail)


def test_bytes_that_change_on_the_way(monkeypatch):
    whole = network._send
    monkeypatch.setattr(network, "_send", lambda c, s: (whole(c, s)[0], False))
    results = pair()
    assert results[0].condition is Condition.FAULTY
    assert pairs.measured_of(results).damaged


def test_no_answer_is_unknown():
    assert pairs.measured_of([]) == Measured(None, why="no answer")


@pytest.mark.long
def test_an_all_reduce_between_processes(tmp_path):
    peers = [{"node": n, "host": HOST, "port": 0} for n in ("a", "b")]
    peers[0]["port"] = free_port()
    tasks = [
        {"node": n, "host": HOST, "seconds": 0.05, "only": ["all-reduce"], "peers": peers} for n in ("a", "b")
    ]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "holdfast.tools.checks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in tasks
    ]
    for child, task in zip(children, tasks, strict=True):
        child.stdin.write(json.dumps(task).encode())
        child.stdin.close()
    for child in children:
        lines = [json.loads(line) for line in child.stdout]
        child.stdout.close()
        assert child.wait() == 0
        (result,) = [line["result"] for line in lines if "result" in line]
        assert result["condition"] == "healthy", result
        assert result["value"] > 0
        assert "gloo, 2 nodes" in result["detail"]
