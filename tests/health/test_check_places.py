"""`holdfast check --write-topology`: from the orders to the agents to the file that `holdfast run --topology` takes."""

import asyncio
import json
import sys
from collections import Counter

import msgspec
import pytest
from test_check_runs import FAULTY, HEALTHY, Fleet, state

from holdfast.cli.app import main
from holdfast.engines import jobs, reach
from holdfast.engines.topology import parse_topology, read_topology, topology_text
from holdfast.errors import UsageError
from holdfast.health.checks.places import MOST_NODES
from holdfast.protocol import messages as m
from holdfast.protocol.check_options import CheckOptions
from holdfast.protocol.health import CheckResult

EVERY = CheckOptions(every_pair=True, disturb=True)


class Racks(Fleet):
    """Agents in racks: between them lie four times the time and a fifth of the bandwidth."""

    def __init__(self, racks: str, apart: bool = True, **kind) -> None:
        """racks: of each node, one letter."""
        super().__init__(**kind)
        self.racks = {f"n{i}": rack for i, rack in enumerate(racks)}
        self.apart = apart
        self.calls: list[frozenset[str]] = []

    def answer(self, node: str, order: m.RunChecks) -> None:
        assert order.only == ("pair",)
        results: tuple[CheckResult, ...] = ()
        if not order.port:
            self.at_once -= 1
            other = order.peers[0].node
            self.calls.append(frozenset((node, other)))
            near = self.racks[node] == self.racks[other] or not self.apart
            bad = {node, other} & self.faulty
            rate, latency_s = (5.0, 100e-6) if near else (1.0, 400e-6)
            results = (
                CheckResult(
                    name="pair",
                    condition=FAULTY if bad else HEALTHY,
                    detail="refused" if bad else "",
                    value=0.0 if bad else rate,
                    unit="GB/s",
                ),
                *(() if bad else (CheckResult(name="pair-latency", condition=HEALTHY, value=latency_s),)),
            )
        assert self.runs.answered(node, m.Checked(order.request, results))


class Client:
    """A command's way to a coordinator, without the connection between them."""

    def __init__(self, fleet: Fleet, of) -> None:
        self._fleet, self._of = fleet, of

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_) -> None:
        await self._fleet.runs.close()

    async def post(self, page: str, data: str) -> object:
        assert page == "/check"
        id = self._fleet.runs.begin(msgspec.json.decode(data, type=CheckOptions), self._of)
        return msgspec.to_builtins(await self._fleet.runs.news(id, 0, 5))

    async def get(self, page: str) -> object:
        id, after = (int(word.partition("=")[2]) for word in page.partition("?")[2].split("&"))
        return msgspec.to_builtins(await self._fleet.runs.news(id, after, 5))


@pytest.fixture
def holdfast(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")

    def call(fleet: Fleet, of, *args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(jobs, "existing", lambda _: tmp_path)
        monkeypatch.setattr(reach, "client_of", lambda _: Client(fleet, of))
        monkeypatch.setattr(sys, "argv", ["holdfast", "check", *map(str, args)])
        try:
            main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
        return code, *capsys.readouterr()

    return call


def test_the_file_has_the_racks_and_run_takes_it(holdfast, tmp_path):
    fleet, file = Racks("abbaab"), tmp_path / "topology.txt"
    code, out, err = holdfast(fleet, state(1, 5), "--disturb", "--write-topology", file)
    assert (code, err) == (0, "")
    expected = {"n0": "d1", "n1": "d2", "n2": "d2", "n3": "d1", "n4": "d1", "n5": "d2"}
    assert read_topology(file) == {node: (place,) for node, place in expected.items()}
    lines = out.splitlines()
    assert lines[0].split() == ["latency", "bandwidth", "pairs", "between", "nodes"]
    assert lines[1].split()[:9] == ["400", "µs", "1", "GB/s", "9", "the", "2", "parts", "of"]
    assert lines[2].split()[:9] == ["100", "µs", "5", "GB/s", "3", "the", "nodes", "of", "d1"]
    assert lines[-1] == f"written: {file}, for `holdfast run --topology {file}`"
    first, *_ = file.read_text().splitlines()
    assert first.startswith("# Measured by holdfast check --write-topology at 20")
    assert first.endswith(": 15 pairs of 6 nodes,")
    assert set(Counter(fleet.calls).values()) == {2}
    assert (len(fleet.calls), fleet.most_at_once) == (30, 3)


def test_many_nodes_are_measured_once():
    fleet = Racks("abc" * 3)
    news = asyncio.run(fleet.check(EVERY, state(0, 9)))
    assert len(news.pairs) == len(fleet.calls) == len(set(fleet.calls)) == 36


@pytest.mark.parametrize("turn", [0, 1])
def test_a_pair_that_was_disturbed_in_one_turn_is_as_in_the_other(turn):
    class Disturbed(Racks):
        """In this turn n1 is far from everybody."""

        def answer(self, node: str, order: m.RunChecks) -> None:
            self.racks["n1"] = "b" if len(self.calls) // 3 == turn else "a"
            super().answer(node, order)

    fleet = Disturbed("aaa")
    news = asyncio.run(fleet.check(EVERY, state(0, 3)))
    assert [(p.latency_s, p.bytes_per_s) for p in news.pairs] == [(100e-6, 5e9)] * 3
    assert len(fleet.calls) == 6


def test_it_writes_over_its_own_file_and_over_no_other(holdfast, tmp_path):
    file = tmp_path / "topology.txt"
    for racks in ("aabb", "abab"):
        assert holdfast(Racks(racks), state(0, 4), "--write-topology", file)[0] == 0
    assert {p for p, place in read_topology(file).items() if place == ("d1",)} == {"n0", "n2"}
    file.write_text("n0 hall/rack1\n")
    fleet = Racks("aabb")
    code, _, err = holdfast(fleet, state(0, 4), "--write-topology", file)
    assert code == 2
    assert "the file exists and was not written by this command" in err
    assert (file.read_text(), fleet.calls) == ("n0 hall/rack1\n", [])


def test_without_a_difference_there_is_no_file(holdfast, tmp_path):
    file = tmp_path / "topology.txt"
    code, out, _ = holdfast(Racks("aabb", apart=False), state(0, 4), "--write-topology", file)
    assert code == 0
    assert (
        out.splitlines()[-1]
        == "all nodes are in one place: no difference between pairs was measured; no file was written"
    )
    assert not file.exists()


def test_a_silent_node_is_named_and_asked_once(holdfast, tmp_path):
    fleet, file = Racks("aabbb", gone={"n4"}), tmp_path / "topology.txt"
    code, out, _ = holdfast(fleet, state(0, 5), "--write-topology", file)
    assert code == 3
    assert "n4 was not placed: n4 did not answer" in out
    assert read_topology(file) == {"n0": ("d1",), "n1": ("d1",), "n2": ("d2",), "n3": ("d2",)}
    assert "# not placed: n4: n4 did not answer" in file.read_text()
    assert [n for n, _ in fleet.orders].count("n4") == 1


def test_nodes_that_reach_nobody_are_named(holdfast, tmp_path):
    file = tmp_path / "topology.txt"
    code, out, _ = holdfast(Racks("aaabb", faulty={"n1"}), state(0, 5), "--write-topology", file)
    assert (code, "n1" in read_topology(file)) == (3, False)
    assert "n1 was not placed: refused" in out
    code, out, _ = holdfast(
        Racks("aaa", faulty={"n0", "n1"}), state(0, 3), "--write-topology", tmp_path / "b"
    )
    assert code == 3
    assert "no pair of nodes could be measured; no file was written" in out


def test_programs_get_all_figures(holdfast, tmp_path):
    file = tmp_path / "topology.txt"
    code, out, _ = holdfast(Racks("aabb"), state(0, 4), "--write-topology", file, "--json", "-")
    told = json.loads(out)
    assert (code, told["places"]["n2"], told["file"]) == (0, "d2", str(file))
    assert {(*p["nodes"], p["bytes_per_s"]) for p in told["pairs"]} >= {("n0", "n3", 1e9), ("n1", "n2", 1e9)}
    assert told["between"][0]["latency_s"] == 400e-6


@pytest.mark.parametrize(
    ("of", "args", "message"),
    [
        (
            state(1, 5),
            ("n0", "n1", "n2"),
            "n0: measuring every pair would disturb the workers that train there",
        ),
        (
            state(2, 2),
            (),
            "it needs at least 3 nodes, but there are 2: n2, n3. Add --disturb to measure nodes that train, too",
        ),
        (
            state(0, MOST_NODES + 1),
            (),
            f"specify at most {MOST_NODES} nodes, or take the topology from Slurm",
        ),
        (state(0, 4), ("--deep",), "run `holdfast check --deep` separately"),
    ],
)
def test_refused(holdfast, tmp_path, of, args, message):
    fleet = Racks("a" * 70)
    code, out, err = holdfast(fleet, of, *args, "--write-topology", tmp_path / "topology.txt")
    assert (code, out, fleet.orders) == (2, "", [])
    assert message in " ".join(err.split())


def test_a_file_that_cannot_be_written_is_refused_first(holdfast, tmp_path):
    fleet = Racks("aabb")
    for file, why in ((tmp_path / "none" / "t", "does not exist"), (tmp_path, "Is a directory")):
        code, _, err = holdfast(fleet, state(0, 4), "--write-topology", file)
        assert (code, why in err, fleet.orders) == (2, True, [])


def test_progress_counts_batches():
    async def doings() -> list[str]:
        fleet = Racks("aabb")
        id, said = fleet.runs.begin(EVERY, state(1, 3)), []
        news = await fleet.runs.news(id, 0, 5)
        while not news.over:
            said.append(news.doing)
            news = await fleet.runs.news(id, news.version, 5)
        await fleet.runs.close()
        return said

    assert [x for x in asyncio.run(doings()) if x] == [f"pairs, batch {i} of 6" for i in range(1, 7)]


def test_nobody_is_blamed_for_being_far_away():
    fleet = Racks("aabb")
    news = asyncio.run(fleet.check(EVERY, state(1, 3)))
    assert (len(news.pairs), fleet.found) == (6, {})
    with pytest.raises(UsageError, match="needs at least 3 nodes"):
        fleet.runs.begin(EVERY, state(1, 1))


def test_notes_of_the_file_are_comments():
    places = {"n0": ("d1",), "n10": ("d2", "d1"), "n11": ()}
    text = topology_text(places, ["about", "", "it # all"])
    assert text == "# about\n#\n# it # all\nn0   d1\nn10  d2/d1\n"
    assert parse_topology(text) == {"n0": ("d1",), "n10": ("d2", "d1")}
