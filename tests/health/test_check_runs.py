"""Checks of a job's nodes: who is asked for what, and what comes of the answers."""

import asyncio

import pytest

from holdfast.coordinator.kernel.state import CoreState, Node
from holdfast.coordinator.service.checking import CheckRuns, choose
from holdfast.errors import UsageError
from holdfast.health.checks.fleet import summary
from holdfast.protocol import messages as m
from holdfast.protocol.check_options import CheckOptions
from holdfast.protocol.health import CheckNews, CheckResult, Condition
from holdfast.protocol.job import JobSpec

HEALTHY, FAULTY, UNKNOWN = Condition.HEALTHY, Condition.FAULTY, Condition.UNKNOWN


def state(training: int = 1, spares: int = 3, same_host: bool = False) -> CoreState:
    names = [f"n{i}" for i in range(training + spares)]
    made = CoreState(spec=JobSpec(name="job", script="train.py"))
    for i, name in enumerate(names):
        host = "10.0.0.1" if same_host else f"10.0.0.{i}"
        made.membership.nodes[name] = Node(
            name=name, session="s", host=host, slots=1, last_seen_s=0.0, ports=(7000 + i, 8000 + i)
        )
    members = tuple(m.Member(rank=i, worker=f"w{i}", node=names[i], slot=0) for i in range(training))
    made.membership.generation = m.Generation(number=1, members=members)
    return made


class Fleet:
    """Agents that answer at once, as the machines are: `slow` ones, ways that are bad, and those that are silent."""

    def __init__(self, slow=(), faulty=(), silent=(), gone=(), rdma=(), slow_rdma=()) -> None:
        self.rdma, self.slow_rdma = set(rdma), set(slow_rdma)
        self.slow, self.faulty, self.silent, self.gone = set(slow), set(faulty), set(silent), set(gone)
        self.orders: list[tuple[str, m.RunChecks]] = []
        self.found: dict[str, m.FindingsReported] = {}
        self.at_once = self.most_at_once = 0
        self.runs = CheckRuns(self.send, self.found.__setitem__)

    def send(self, node: str, order: m.RunChecks) -> None:
        self.orders.append((node, order))
        loop = asyncio.get_running_loop()
        if node in self.gone:
            loop.call_soon(self.runs.lost, node)
        elif node not in self.silent:
            if order.only in (("pair",), ("rdma-pair",)) and not order.port:
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
            loop.call_soon(self.answer, node, order)

    def answer(self, node: str, order: m.RunChecks) -> None:
        results: tuple[CheckResult, ...] = ()
        if not order.only:
            results = (
                CheckResult(name="disk", condition=FAULTY if node in self.faulty else HEALTHY, detail="x"),
            )
            if node in self.rdma:
                results += (
                    CheckResult(
                        name="rdma-rate", condition=HEALTHY, value=400.0, unit="Gb/s", subject="mlx5_0 port 1"
                    ),
                )
        elif order.only == ("all-reduce",):
            results = (CheckResult(name="all-reduce", condition=HEALTHY, value=1.0, unit="GB/s"),)
        elif not order.port:
            self.at_once -= 1
            other = order.peers[0].node
            (check,) = order.only
            rate = 1.0 if {node, other} & (self.slow if check == "pair" else self.slow_rdma) else 10.0
            results = (CheckResult(name=check, condition=HEALTHY, value=rate, unit="GB/s", with_node=other),)
        assert self.runs.answered(node, m.Checked(order.request, results))

    async def check(self, wish: CheckOptions, of: CoreState) -> CheckNews:
        id = self.runs.begin(wish, of)
        news = await self.runs.news(id, 0, 5)
        while not news.over:
            news = await self.runs.news(id, news.version, 5)
        await self.runs.close()
        return news


def test_a_slow_node_is_singled_out_and_left_out_of_the_group():
    fleet = Fleet(slow={"n2"})
    wish = CheckOptions(nodes=("n0", "n1", "n2", "n3"), deep=True, disturb=True)
    news = asyncio.run(fleet.check(wish, state()))
    assert summary(news.results) == {"n0": HEALTHY, "n1": HEALTHY, "n2": FAULTY, "n3": HEALTHY}
    assert [f.rule for f in fleet.found["n2"].findings] == ["check-pair"]
    group = [o for n, o in fleet.orders if o.only == ("all-reduce",)]
    assert [p.node for p in group[0].peers] == ["n0", "n1", "n3"]
    assert group[0].peers[0].port == 7000


def test_nodes_with_rdma_are_measured_over_it_as_well():
    fleet = Fleet(rdma={"n0", "n1", "n2", "n3"}, slow_rdma={"n1"})
    news = asyncio.run(fleet.check(CheckOptions(deep=True, disturb=True), state(training=1, spares=4)))
    pairs = [o for _, o in fleet.orders if o.only == ("rdma-pair",)]
    assert {p.node for o in pairs for p in o.peers} == fleet.rdma  # n4 has none
    assert [f.rule for f in fleet.found["n1"].findings] == ["check-rdma-pair"]
    assert [n for n, c in summary(news.results).items() if c is FAULTY] == ["n1"]
    group = [o for n, o in fleet.orders if o.only == ("all-reduce",)]
    assert [p.node for p in group[0].peers] == ["n0", "n2", "n3", "n4"]
    fleet = Fleet(rdma={"n0"})
    asyncio.run(fleet.check(CheckOptions(deep=True, disturb=True), state()))
    assert not [o for _, o in fleet.orders if o.only == ("rdma-pair",)]


def test_the_one_that_listens_and_the_one_that_comes_know_of_each_other():
    fleet = Fleet()
    asyncio.run(fleet.check(CheckOptions(nodes=("n1", "n2"), deep=True), state()))
    (listens, comes) = [(n, o) for n, o in fleet.orders if o.only == ("pair",)]
    assert (listens[0], listens[1].port) == ("n1", 8001)
    assert comes[1].peers == (m.Peer("n1", "10.0.0.1", 8001),)


def test_pairs_of_one_machine_are_measured_in_turn():
    fleet = Fleet()
    asyncio.run(fleet.check(CheckOptions(deep=True, disturb=True), state(same_host=True)))
    assert fleet.most_at_once == 1
    fleet = Fleet()
    asyncio.run(fleet.check(CheckOptions(deep=True, disturb=True), state()))
    assert fleet.most_at_once == 2


def test_a_node_that_goes_away_is_unknown():
    fleet = Fleet(gone={"n1"}, faulty={"n2"})
    news = asyncio.run(fleet.check(CheckOptions(), state()))
    assert summary(news.results) == {"n0": HEALTHY, "n1": UNKNOWN, "n2": FAULTY, "n3": HEALTHY}
    assert news.results["n1"][0].detail == "the node did not answer"


def test_deep_checks_leave_alone_what_trains():
    assert [n.name for n in choose(CheckOptions(deep=True), state())] == ["n1", "n2", "n3"]
    assert [n.name for n in choose(CheckOptions(), state())] == ["n0", "n1", "n2", "n3"]
    with pytest.raises(UsageError, match="n0: deep checks would disturb"):
        choose(CheckOptions(nodes=("n0", "n1"), deep=True), state())
    with pytest.raises(UsageError, match=r"no node is free to check \(training: n0, n1\)"):
        choose(CheckOptions(deep=True), state(training=2, spares=0))
    with pytest.raises(UsageError, match="this job does not have a node 'n9'; its nodes are n0"):
        choose(CheckOptions(nodes=("n9",)), state())


def test_an_answer_to_the_core_is_left_to_it():
    fleet = Fleet()
    assert fleet.runs.answered("n0", m.Checked(3, ())) is False
    assert fleet.runs.answered("n0", m.Checked(-3, ())) is True  # too late: nobody waits any more


def test_news_of_a_run_that_nobody_knows():
    with pytest.raises(UsageError, match="run the command again"):
        asyncio.run(Fleet().runs.news(7, 0, 1))


def test_a_node_without_results_is_unknown():
    assert summary({"a": []}) == {"a": UNKNOWN}
    link = CheckResult(name="link", condition=FAULTY, with_node="b")
    assert summary({"a": [CheckResult(name="pair", condition=HEALTHY), link]}) == {"a": HEALTHY}
