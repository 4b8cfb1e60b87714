"""Checks of a running job's nodes that a person asked for: who is asked for what, in which order, and the answers.

It decides nothing about the job. What is faulty goes to the core as findings, like anything else that was seen.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
from aiohttp import web

from holdfast.coordinator.kernel.state import CoreState, Node
from holdfast.errors import UsageError
from holdfast.health.checks import pairs, places
from holdfast.health.checks.check import unknown
from holdfast.health.checks.fleet import against_fleet
from holdfast.protocol import messages as m
from holdfast.protocol.check_options import CheckOptions
from holdfast.protocol.health import CheckNews, CheckResult, Condition, Finding, PairFigures, Remedy, Severity
from holdfast.protocol.wire.decoding import decode

ANSWER_S = 1800.0
"""The longest that a node may take; its agent gives up single checks long before."""

PAIR_ANSWER_S = 180.0
NEWS_S = 1.0
"""So long a question about a run waits for news: shorter than two silent seconds."""

KEPT = 8
LISTENING, COMMON = -1, -2
"""Which of the ports that a node offers are used for pairs, and for the meeting point of all."""

Send = Callable[[str, m.RunChecks], None]
Tell = Callable[[str, m.FindingsReported], None]


def choose(wish: CheckOptions, state: CoreState) -> list[Node]:
    """The nodes that a request for checks is about.

    Raises:
        UsageError: a node does not exist, or trains and must not be disturbed; or there are too many for these checks.
    """
    chosen = _chosen(wish, state)
    if wish.every_pair and len(chosen) < places.LEAST_NODES:
        raise UsageError(
            f"--write-topology compares pairs of nodes, so it needs at least {places.LEAST_NODES} nodes, but there "
            f"are {len(chosen)}: {', '.join(n.name for n in chosen)}. Add --disturb to measure nodes that train, too"
        )
    if wish.every_pair and len(chosen) > places.MOST_NODES:
        raise UsageError(
            f"--write-topology measures every pair, and {len(chosen)} nodes have "
            f"{len(chosen) * (len(chosen) - 1) // 2} pairs: specify at most {places.MOST_NODES} nodes, or take the "
            "topology from Slurm, from the labels of a cluster, or write its file (docs/topology.md)"
        )
    return chosen


def _chosen(wish: CheckOptions, state: CoreState) -> list[Node]:
    loads = wish.deep or wish.every_pair
    what = "measuring every pair" if wish.every_pair else "deep checks"
    there = {n.name: n for n in state.membership.nodes.values() if n.alive}
    training = {x.node for x in state.membership.generation.members} if state.membership.generation else set()
    for name in wish.nodes:
        if name not in there:
            raise UsageError(
                f"this job does not have a node {name!r}; its nodes are {', '.join(there) or 'none'}"
            )
    if not wish.nodes:
        idle = [n for name, n in there.items() if name not in training or wish.disturb or not loads]
        if not idle:
            raise UsageError(
                f"no node is free to check (training: {', '.join(sorted(training)) or 'none'}): {what} would disturb "
                "them; specify nodes and add --disturb"
            )
        return idle
    busy = [name for name in wish.nodes if name in training]
    if loads and busy and not wish.disturb:
        raise UsageError(
            f"{', '.join(busy)}: {what} would disturb the workers that train there; add --disturb, or use `holdfast "
            "drain` first"
        )
    return [there[name] for name in dict.fromkeys(wish.nodes)]


class CheckRuns:
    """The runs of one coordinator. `send` gives an order to an agent, `tell` findings to the core."""

    def __init__(self, send: Send, tell: Tell) -> None:
        self._send, self._tell = send, tell
        self._runs: dict[int, _Run] = {}
        self._count = 0
        # An answer to the coordinator before is none to this one.
        self._requests = -secrets.randbelow(1 << 40)
        self._asked: dict[tuple[str, int], asyncio.Future[tuple[CheckResult, ...] | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, wish: CheckOptions, state: CoreState) -> int:
        """Starts a run; returns its number. Raises UsageError when it cannot be done."""
        nodes = choose(wish, state)
        self._count += 1
        run = _Run(self._count, wish, nodes, self.ask, self._tell)
        self._runs[run.id] = run
        # Only runs that are over, oldest first: a person may still ask for the end of one that runs, however
        # many have begun since.
        for old in [r for r in self._runs.values() if r.news().over][: -KEPT or None]:
            del self._runs[old.id]
        task = asyncio.create_task(run.do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run.id

    async def news(self, id: int, after: int, patience_s: float) -> CheckNews:
        """How far a run is, as soon as it is farther than version `after`.

        Raises:
            UsageError: there is no such run.
        """
        run = self._runs.get(id)
        if run is None:
            raise UsageError(
                "the coordinator does not know these checks, because it was started again; run the command again"
            )
        return await run.wait(after, patience_s)

    async def ask(self, node: str, order: m.RunChecks, patience_s: float) -> tuple[CheckResult, ...] | None:
        """A node's answer to a question; None: it gave none in time."""
        # Downward, so that an answer shows by its sign whether it is for a person or for the core. Both count
        # without knowing of each other.
        self._requests -= 1
        key = node, self._requests
        self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self._send(
                node,
                m.RunChecks(
                    request=key[1],
                    deep=order.deep,
                    peers=order.peers,
                    only=order.only,
                    port=order.port,
                    seconds=order.seconds,
                ),
            )
            async with asyncio.timeout(patience_s):
                return await self._asked[key]
        except TimeoutError:
            return None
        finally:
            del self._asked[key]

    def answered(self, node: str, message: m.Checked) -> bool:
        """Takes an agent's answer. Returns whether it answers a check that a person requested."""
        if (waiting := self._asked.get((node, message.request))) and not waiting.done():
            waiting.set_result(message.results)
        return message.request < 0

    def lost(self, node: str) -> None:
        """A node's connection is gone: it answers nothing more."""
        for (name, _), waiting in self._asked.items():
            if name == node and not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


_wishes = msgspec.json.Decoder(CheckOptions)


def check_routes(runs: CheckRuns, state: Callable[[], CoreState]) -> list[web.RouteDef]:
    """`POST /check`: a CheckOptions as JSON begins a run. `GET /check?id=&after=`: its news, as soon as there are some."""

    async def begin(request: web.Request) -> web.StreamResponse:
        try:
            wish = decode(
                _wishes.decode, await request.read(), "the body must be CheckOptions", error=UsageError
            )
            id = runs.begin(wish, state())
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        return _json(await runs.news(id, 0, NEWS_S))

    async def news(request: web.Request) -> web.StreamResponse:
        try:
            id, after = (int(request.query[key]) for key in ("id", "after"))
            return _json(await runs.news(id, after, NEWS_S))
        except (KeyError, ValueError):
            return web.Response(status=400, text="id and after must be whole numbers: ?id=N&after=VERSION")
        except UsageError as error:
            return web.Response(status=400, text=str(error))

    return [web.post("/check", begin), web.get("/check", news)]


def _json(value: CheckNews) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


Ask = Callable[[str, m.RunChecks, float], Awaitable[tuple[CheckResult, ...] | None]]


class _Run:
    """One run of checks: each node by itself, then in pairs, then all together. Or every pair, and nothing else."""

    def __init__(self, id: int, wish: CheckOptions, nodes: Sequence[Node], ask: Ask, tell: Tell) -> None:
        self.id = id
        self._wish, self._nodes, self._ask, self._tell = wish, {n.name: n for n in nodes}, ask, tell
        self._doing = ""
        self._waiting: set[str] = set()
        self._results: dict[str, list[CheckResult]] = {name: [] for name in self._nodes}
        self._pairs: dict[pairs.Pair, pairs.Measured] = {}
        self._silent: set[str] = set()
        self._version = 0
        self._over = False
        self._changed = asyncio.Condition()

    def news(self) -> CheckNews:
        """How far it is."""
        results = {n: tuple(r) for n, r in self._results.items()} if self._over else {}
        return CheckNews(
            id=self.id,
            version=self._version,
            doing=self._doing,
            waiting=tuple(sorted(self._waiting)),
            over=self._over,
            results=results,
            pairs=tuple(map(_figures, self._pairs.items())) if self._over else (),
        )

    async def wait(self, after: int, patience_s: float) -> CheckNews:
        """As `news`, when there are some, or the patience is over."""
        try:
            async with asyncio.timeout(patience_s), self._changed:
                await self._changed.wait_for(lambda: self._version > after or self._over)
        except TimeoutError:
            pass
        return self.news()

    async def _say(self, doing: str, waiting: Iterable[str]) -> None:
        async with self._changed:
            self._doing, self._waiting = doing, set(waiting)
            self._version += 1
            self._changed.notify_all()

    async def do(self) -> None:
        """From the first order to the last answer."""
        try:
            await self._do()
        finally:  # whoever waits for the end hears of it, however it came
            self._over = True
            await self._say("", ())

    async def _do(self) -> None:
        wish = self._wish
        if wish.every_pair:
            await self._every_pair()
            return
        await self._say("each node by itself", self._nodes)
        # Nodes by themselves in parallel, pairs in rounds, everyone at the end: each stage leaves out whoever
        # failed before, because a broken node makes its partners look broken.
        await asyncio.gather(*(self._alone(name) for name in self._nodes))
        able = [n for n, results in self._results.items() if any(r.name != "answer" for r in results)]
        if wish.deep and len(able) > 1:
            await self._in_pairs(able)
            await self._together(able)
        # Compared only when all have answered: slow is what is slower than the others of the same model.
        self._results = against_fleet(self._results)
        for name, results in self._results.items():
            if findings := tuple(_finding(r) for r in results if r.condition is Condition.FAULTY):
                self._tell(name, m.FindingsReported(findings))

    async def _alone(self, name: str) -> None:
        order = m.RunChecks(request=0, deep=self._wish.deep, seconds=self._wish.seconds)
        self._add(name, await self._ask(name, order, ANSWER_S), "answer")
        await self._say(self._doing, self._waiting - {name})

    def _add(self, name: str, results: tuple[CheckResult, ...] | None, what: str) -> None:
        self._results[name] += results if results is not None else [unknown(what, "the node did not answer")]

    # ------------------------------------------------------------ pairs

    async def _in_pairs(self, names: Sequence[str]) -> None:
        await self._two_rounds("pair", names)
        active = [n for n in names if any(r.name == "rdma-rate" for r in self._results[n])]
        if len(active) > 1:
            await self._two_rounds("rdma-pair", active)

    async def _every_pair(self) -> None:
        """Measures, and judges nobody: a pair that is slower than others may only be farther apart."""
        names = list(self._nodes)
        batches = places.tournament(names) * places.turns(names)
        for number, batch in enumerate(batches, 1):
            # A node whose agent hangs would hold up every batch for as long as an answer may take.
            gone = {pair: silent for pair in batch for silent in pair if silent in self._silent}
            for pair, silent in gone.items():
                self._pairs.setdefault(pair, _no_answer(silent))
            asked = [pair for pair in batch if pair not in gone]
            found = await self._round("pair", f"batch {number} of {len(batches)}", [asked])
            for pair, measured in found.items():
                self._pairs[pair] = places.better(self._pairs.get(pair, measured), measured)

    async def _two_rounds(self, check: str, names: Sequence[str]) -> None:
        first = await self._round(check, "first round", pairs.first_round(names))
        second = await self._round(check, "second round", pairs.second_round(first))
        for name, results in pairs.judge(first, second, check.removesuffix("pair")).items():
            self._results[name] += results

    async def _round(
        self, check: str, which: str, batches: Sequence[Sequence[pairs.Pair]]
    ) -> dict[pairs.Pair, pairs.Measured]:
        measured: dict[pairs.Pair, pairs.Measured] = {}
        for batch in batches:
            await self._say(f"{check}s, {which}", {n for p in batch for n in p})
            # Two pairs on one machine would share its network card, and each would measure half of it.
            for apart in self._apart(batch):
                found = await asyncio.gather(*(self._measure(check, pair) for pair in apart))
                measured |= dict(zip(apart, found, strict=True))
        return measured

    def _apart(self, batch: Sequence[pairs.Pair]) -> list[list[pairs.Pair]]:
        """Pairs in turn where they share a machine: they would measure each other."""
        turns: list[list[pairs.Pair]] = []
        hosts: dict[int, set[str]] = defaultdict(set)
        for pair in batch:
            mine = {self._nodes[n].host for n in pair}
            turn = next((i for i in range(len(turns)) if not hosts[i] & mine), len(turns))
            if turn == len(turns):
                turns.append([])
            turns[turn].append(pair)
            hosts[turn] |= mine
        return turns

    async def _measure(self, check: str, pair: pairs.Pair) -> pairs.Measured:
        listener, caller = (self._nodes[n] for n in pair)
        if not listener.ports:
            return pairs.Measured(None, why=f"{listener.name} did not offer a port")
        port = listener.ports[LISTENING]
        seconds = self._wish.seconds
        to_caller = m.Peer(caller.name, caller.host, 0)
        to_listener = m.Peer(listener.name, listener.host, port)
        there = m.RunChecks(
            request=0, deep=True, peers=(to_caller,), only=(check,), port=port, seconds=seconds
        )
        here = m.RunChecks(request=0, deep=True, peers=(to_listener,), only=(check,), port=0, seconds=seconds)
        # Both at once. The listener waits for its caller only for a short time, and the caller tries until
        # the listener is there.
        at_listener, at_caller = await asyncio.gather(
            self._ask(listener.name, there, PAIR_ANSWER_S), self._ask(caller.name, here, PAIR_ANSWER_S)
        )
        for name, answer in ((listener.name, at_listener), (caller.name, at_caller)):
            if answer is None:
                self._silent.add(name)
                return _no_answer(name)
        return pairs.measured_of(list(at_caller or ()), check)

    # ------------------------------------------------------------ all together

    async def _together(self, names: Sequence[str]) -> None:
        """Without those that are known to be bad: they would hold up all others."""
        bad = {n for n in names if any(_holds_up(r) for r in self._results[n])}
        group = [n for n in names if n not in bad]
        if len(group) < 2 or not self._nodes[group[0]].ports:
            return
        await self._say("all-reduce over all", group)
        port = self._nodes[group[0]].ports[COMMON]
        peers = tuple(m.Peer(n, self._nodes[n].host, port) for n in group)
        order = m.RunChecks(
            request=0, deep=True, peers=peers, only=("all-reduce",), port=0, seconds=self._wish.seconds
        )
        answers = await asyncio.gather(*(self._ask(n, order, PAIR_ANSWER_S) for n in group))
        for name, answer in zip(group, answers, strict=True):
            self._add(name, answer, "all-reduce")


def _no_answer(node: str) -> pairs.Measured:
    return pairs.Measured(None, why=f"{node} did not answer")


def _figures(one: tuple[pairs.Pair, pairs.Measured]) -> PairFigures:
    nodes, m = one
    return PairFigures(
        nodes=nodes, bytes_per_s=m.bytes_per_s, latency_s=m.latency_s, why=m.why, damaged=m.damaged
    )


def _holds_up(result: CheckResult) -> bool:
    """An RDMA pair that could not be measured says nothing about a group, which may do without."""
    bad = (Condition.FAULTY, Condition.UNKNOWN) if result.name == "pair" else (Condition.FAULTY,)
    return result.name in ("pair", "rdma-pair") and result.condition in bad


def _finding(result: CheckResult) -> Finding:
    """A person asked for the check, so a person hears of it; nothing is done by itself."""
    subject = f"way to {result.with_node}" if result.with_node else result.subject
    figures = f"{result.value:g} {result.unit}" if result.value is not None and not result.digest else ""
    evidence = "; ".join(filter(None, (result.detail, figures)))
    return Finding(
        rule=f"check-{result.name}",
        severity=Severity.ERROR,
        remedy=Remedy.ASK,
        source="check",
        subject=subject,
        evidence=evidence,
    )
