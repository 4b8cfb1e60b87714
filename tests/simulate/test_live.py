"""A simulated cluster that is driven from outside, and struck where somebody points."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from holdfast.coordinator.kernel.index import validate
from holdfast.coordinator.membership.nodes import KEPT_GONE
from holdfast.coordinator.service.page_host import prepared
from holdfast.errors import UsageError
from holdfast.protocol.ledger import LedgerEvent
from holdfast.tools.simulate.live import BEGIN_S, STALE, STRIKES, LiveCluster
from holdfast.tools.simulate.scenario import Scenario, read
from holdfast.tools.simulate.trial import run

NODES, SPARES = 64, 16
Entries = list[tuple[float, LedgerEvent]]


def scenario(**fields) -> Scenario:
    return read({"nodes": NODES, "days": 30, "rate": "0", "spares": SPARES, "min_nodes": 32} | fields)


def begun(**fields) -> tuple[LiveCluster, Entries]:
    entries: Entries = []
    cluster = LiveCluster(scenario(**fields), 0, "seen", lambda t_s, event: entries.append((t_s, event)))
    cluster.begin()
    return cluster, entries


def go(cluster: LiveCluster, seconds: float, piece_s: float = 1.0) -> None:
    """Lets time pass in pieces, as whoever drives it does."""
    end_s = cluster.now + seconds
    while cluster.now < end_s and cluster.finished_s is None:
        cluster.advance(min(end_s, cluster.now + piece_s))
        cluster.report()


def letters(cluster: LiveCluster) -> Counter[str]:
    return Counter("".join(rack for racks in cluster.map()["switches"] for rack in racks))


def kinds(entries: Entries) -> list[str]:
    return [event.kind for _, event in entries]


def test_it_begins_with_a_job_that_trains_and_has_its_spares() -> None:
    cluster, _ = begun()
    assert cluster.steps.committed == 1
    assert letters(cluster) == {"t": NODES, "w": SPARES}
    racks = [rack for racks in cluster.map()["switches"] for rack in racks]
    assert [len(rack) for rack in racks] == [16] * 5
    nodes = cluster.rack(2)["nodes"]
    assert [x["node"] for x in nodes] == [f"n{n:05d}" for n in range(32, 48)]
    assert sorted(x["rank"] for n in range(4) for x in cluster.rack(n)["nodes"]) == list(range(NODES))


def test_a_rack_without_power_is_one_incident_and_spares_take_its_place() -> None:
    cluster, entries = begun()
    go(cluster, 100)
    before, step = len(entries), cluster.steps.committed
    assert cluster.strike("rack-1", "power-off") == "rack-1 loses power: 16 nodes"
    # The core finds out by the silence of the nodes, and not by the strike.
    assert letters(cluster)["t"] == NODES
    go(cluster, 3)
    assert letters(cluster)["l"] == 16
    go(cluster, 100)
    told = kinds(entries[before:])
    assert (told.count("incident-opened"), told.count("incident-closed"), told.count("node-lost")) == (
        1,
        1,
        16,
    )
    assert letters(cluster) == {"t": NODES, "l": 16}
    assert cluster.steps.committed > step
    assert cluster.steps.lost == 0
    # Others come for them, and stand where those stood.
    go(cluster, 3600)
    assert letters(cluster) == {"t": NODES, "w": SPARES}
    assert {x["state"] for x in cluster.rack(1)["nodes"]} <= {"t", "w"}


def test_without_enough_spares_it_goes_on_smaller_and_grows_again() -> None:
    cluster, _ = begun(spares=4)
    cluster.strike("rack-0", "power-off")
    go(cluster, 120)
    assert letters(cluster) == {"t": NODES - 12, "l": 16}
    go(cluster, 3600)
    assert letters(cluster) == {"t": NODES, "w": 4}


def test_a_switch_takes_all_of_its_racks() -> None:
    cluster, _ = begun(nodes=256, min_nodes=64)
    assert cluster.strike("switch-1", "cut") == "switch-1 is cut off: 128 nodes"
    go(cluster, 120)
    assert [set("".join(racks)) for racks in cluster.map()["switches"]] == [{"t"}, {"l"}, {"t"}]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kill-worker", {"worker-exited", "broke"}),
        ("stop-worker", {"stalled", "stall-judged", "broke"}),
        ("kill-node", {"node-lost", "broke"}),
        ("slow", {"finding", "verdict", "node-leaving", "changed"}),
        ("xid-79", {"finding", "verdict", "node-lost", "broke"}),
        ("xid-94", {"finding", "verdict", "broke"}),
    ],
)
def test_what_may_happen_to_a_node_is_found_and_mended_by_the_core(kind: str, told: set[str]) -> None:
    cluster, entries = begun()
    go(cluster, 50)
    before = len(entries)
    assert "n00005, rank 5" in cluster.strike("rank-5", kind)
    go(cluster, 400)
    assert told | {"fault-injected", "formed", "incident-opened"} <= set(kinds(entries[before:]))
    assert letters(cluster)["t"] == NODES
    assert cluster.steps.running


def test_how_it_is_driven_changes_nothing_that_is_decided() -> None:
    """In pieces of other lengths, with the same strikes at the same times."""

    def lived(piece_s: float) -> tuple[list[tuple[float, str]], list[int]]:
        cluster, entries = begun()
        for target, kind in (("n00003", "kill-worker"), ("rack-2", "power-off"), ("rank-7", "stop-worker")):
            go(cluster, 500, piece_s)
            cluster.strike(target, kind)
        go(cluster, 2000, piece_s)
        # Saves are told when it is reported, and that is what the pieces are.
        decided = [(t_s, e.kind) for t_s, e in entries if e.kind not in ("snapshot", "saved")]
        return decided, [step.step for step in cluster.committed]

    decided, steps = lived(1.3)
    assert (decided, steps) == lived(97.0)
    assert sum(kind == "incident-closed" for _, kind in decided) == 3
    assert steps == list(range(len(steps)))


def test_it_loses_as_much_as_a_trial_of_the_same_seed() -> None:
    asked = read({"nodes": NODES, "days": 0.5, "rate": "0.9%", "spares": SPARES, "min_nodes": 32})
    cluster = LiveCluster(asked, 3, "seen", lambda t_s, event: None)
    cluster.begin()
    go(cluster, math.inf, 60.0)
    trial = run(asked, 3, fold=False)
    assert trial.incidents > 3
    assert (cluster.incidents, cluster.failures) == (trial.incidents, trial.failures)
    assert cluster.finished_s == pytest.approx(trial.wall_s, rel=1e-3)
    assert cluster.next_s() == math.inf


def test_each_step_is_told_once_with_its_time() -> None:
    cluster, _ = begun()
    go(cluster, 60, 7.0)
    cluster.strike("n00003", "kill-worker")
    go(cluster, 300, 33.0)
    steps = cluster.committed
    assert [x.step for x in steps] == list(range(len(steps)))
    assert all(b.t_s - a.t_s >= 10.0 - 1e-6 for a, b in itertools.pairwise(steps))
    assert {x.generation for x in steps} == {1, 2}
    assert steps[0].t_s + BEGIN_S == pytest.approx(1071.0)


@pytest.mark.parametrize(
    ("target", "kind", "says"),
    [
        ("rack-99", "power-off", "rack-99 does not exist; the last one is rack-4"),
        ("switch-1", "cut", "switch-1 does not exist; the last one is switch-0"),
        ("rank-64", "kill-worker", "the job does not have a rank 64: it has 64 ranks"),
        ("n99999", "kill-node", "n99999 is not a node of the job at present"),
        ("rack-1", "kill-worker", "is not available for a rack; choose one of power-off"),
        ("n00001", "power-off", "is not available for a node; choose one of kill-worker"),
        ("rack-1", "", "kind '' is not available"),
        ("", "cut", "must be a node, rank, rack or switch"),
        ("rack-1; rack-2", "power-off", "must be a node, rank, rack or switch"),
        ("rack-٣", "power-off", "must be a node, rank, rack or switch"),
        ("rack-" + "9" * 5000, "power-off", "must be a node, rank, rack or switch"),
    ],
)
def test_what_cannot_be_struck_is_refused_with_a_sentence(target: str, kind: str, says: str) -> None:
    cluster, entries = begun()
    before = len(entries)
    with pytest.raises(UsageError, match=says) as caught:
        cluster.strike(target, kind)
    assert len(str(caught.value)) < 200
    assert len(entries) == before


def test_what_is_gone_cannot_be_struck_again_and_a_look_strikes_nothing() -> None:
    cluster, entries = begun()
    assert cluster.strike("rack-1", "power-off", dry=True) == "rack-1 loses power: 16 nodes"
    go(cluster, 30)
    assert "node-lost" not in kinds(entries)
    cluster.strike("rack-1", "power-off")
    with pytest.raises(UsageError, match="nothing is left to strike"):
        cluster.strike("rack-1", "power-off")


def test_memory_does_not_grow_with_the_time_that_passes() -> None:
    cluster, entries = begun(
        nodes=8, spares=2, min_nodes=4, memory_every="0", durable_every="0", max_restarts=1000
    )
    # The core itself remembers some of the nodes that are gone.
    most = 10 + 2 * KEPT_GONE + 2
    for _ in range(5 * KEPT_GONE):
        cluster.strike("rank-1", "kill-node")
        go(cluster, 1200, 400.0)
        assert len(cluster.machines) <= most
        assert len(cluster.heap) <= STALE * (most + 25) + 50
        cluster.committed.clear()
    assert kinds(entries).count("incident-closed") == cluster.nodes_new == 5 * KEPT_GONE


@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 40))]
)
def test_strikes_at_any_time_leave_a_valid_job(seed: int) -> None:
    """Whatever is struck, drained and resized in the middle of whatever goes on."""
    rng = random.Random(seed)
    fields = {"cloud": rng.choice(["true", "false"]), "replace": rng.choice(["1m", "15m"]), "repair": "1h"}
    cluster, _ = begun(spares=rng.choice([0, 16]), min_nodes=4, rate="0.1%", **fields)
    struck = 0
    for _ in range(40):
        go(cluster, rng.choice([0.01, 0.5, 3, 12, 60, 600, 2000]), rng.choice([5.0, 50.0, 500.0]))
        what = rng.choice(["node", "rank", "rack", "switch"])
        number = rng.randrange(NODES if what in ("node", "rank") else 5)
        target = f"n{number:05d}" if what == "node" else f"{what}-{number}"
        try:
            cluster.strike(target, rng.choice(list(STRIKES["node" if what == "rank" else what])))
            struck += 1
            name, given = rng.choice(
                [("drain", {"node": f"n{number:05d}"}), ("resize", {"nodes": str(40 + number % 24)})]
            )
            cluster.tell([prepared(cluster.core.state, name, given)[1]])
        except UsageError:
            pass  # it is gone already
        assert [*validate(cluster.core.state), *cluster.core.index.differences()] == []
        assert sum(letters(cluster).values()) == cluster.scenario.nodes + cluster.scenario.spares
    assert struck > 5
