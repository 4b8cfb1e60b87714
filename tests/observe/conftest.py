import pytest


@pytest.fixture
def incident():
    return {
        "id": 1, "fault": "kill-node:rank=1", "injected": True, "node": "node1", "ranks": [1], "at_step": 120,
        "t_s": 41.2, "detect_s": 0.161, "decide_s": 0.0143, "replace_s": None, "join_s": 0.057, "restore_s": 0.048,
        "first_step_s": 0.21, "stall_s": 0.44, "full_strength_s": 0.44, "lost_steps": 0, "rung": "spare",
        "cause": "its agent's connection closed",
    }  # fmt: skip


@pytest.fixture
def report(incident):
    """As `--report` writes it, of a job that finished."""
    return {
        "schema": 1, "job": "demo", "engine": "local", "outcome": "finished", "reason": None,
        "world": {"target": 4, "history": [[1.0, 4], [40.0, 3], [41.0, 4]]},
        "steps": {"committed": 400, "lost": 0, "median_s": 0.21},
        "pace": {"steps_per_s": 9.91, "until": 400, "left": None, "eta_s": None},
        "incidents": [incident],
        "goodput": {"wall_s": 93.2, "productive_s": 80.0, "share": 0.858},
        "final": {"loss": 2.6190, "params_xxh3": "5df08a9268549ac9", "replicas_equal": True},
        "blame": None,
    }  # fmt: skip


@pytest.fixture
def failed(report):
    """The same, of one whose script is at fault."""
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/home/someone/train.py", line 37, in main\n'
        '    raise ValueError("a bad sample")\n'
        "ValueError: a bad sample\n"
    )
    return report | {
        "outcome": "failed",
        "reason": "the same error at step 12 in 2 attempts on 2 workers",
        "blame": {
            "cause": "ValueError in forward: a bad sample", "rank": 1, "node": "node1", "step": 12,
            "traceback": traceback, "tail": ["epoch 1", *traceback.splitlines()], "log": "/logs/node1.0-1.log",
        },
    }  # fmt: skip


@pytest.fixture
def status(incident):
    """As the coordinator tells it while the job runs."""

    def worker(name, rank, state, step):
        return {
            "worker": name,
            "node": name.split(".")[0],
            "rank": rank,
            "state": state,
            "restored": None,
            "step": step,
            "log": "",
        }

    rest = {
        "earlier_stalls": 0, "earlier_stall_s": 0.0, "rule": None, "quiet": False, "verdict": None, "where": None,
    }  # fmt: skip
    return {
        "job": "demo", "phase": "running", "outcome": None, "reason": None, "level": 2, "generation": 2,
        "world": 2, "target": 2, "step": 1234, "loss": 2.619, "median_s": 0.2, "t_s": 61.0,
        "pace": {"steps_per_s": 5.0, "until": None, "left": None, "eta_s": None},
        "nodes": [
            {"node": name, "host": "127.0.0.1", "place": [], "alive": alive, "failures": 0}
            for name, alive in (("node0", True), ("node1", False), ("node2", True), ("node3", True), ("node4", True))
        ],
        "workers": [
            worker("node2.0#3", 1, "member", 1234),
            worker("node0.0#1", 0, "member", 1234),
            worker("node3.0#4", None, "ready", None),
        ],
        "incidents": [incident | rest],
        "blame": None,
    }  # fmt: skip
