"""`python -m bench.rounds`: what a vote takes, in a mesh and over a tree, and what it would take in a large job.

Members are processes that only vote, one round after the other. What is compared takes turns in blocks, in processes that are all
there from the beginning. With --before SRC, votes of small jobs are compared with those of another version, whose `src` it is.

For large jobs a vote is computed. h is a hop, by wall clock: from a process that sends to one that waits for it. c is a word, in
processor time: read, decoded and added up, or sent. Both are measured on this machine, over loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.recovery.environments import versions
from holdfast.protocol.messages import Generation, Member
from holdfast.train.control_channel import ChannelListener
from holdfast.train.member_tree import FAN_OUT
from holdfast.train.tree_channel import TreeChannel

SOURCES = Path(__file__).parents[2] / "src"
TEAM = Path(__file__).with_name("team.py")
LOCAL = 8
"""Workers of a node."""
LARGE = (64, 512, 4_096)
"""Nodes of the jobs that are computed."""
WIDTH = 100


class Team:
    """The members of one generation."""

    def __init__(self, members: int, nodes: int, fan_out: int = 0, sources: Path = SOURCES) -> None:
        """fan_out: 0: a mesh, where there are few members."""
        self.took_s: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, TEAM, str(members), str(nodes), str(fan_out)],
            env=dict(os.environ, PYTHONPATH=str(sources)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.vote(20)  # everything is imported and connected
        self.took_s.clear()

    def vote(self, rounds: int) -> None:
        """A block of rounds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{rounds}\n")
        self._process.stdin.flush()
        self.took_s += json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """The members end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__)
    parser.add_argument("--before", type=Path, metavar="SRC", help="the `src` of another version")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each, in turns (default: 20)")
    parser.add_argument("--rounds", type=int, default=500, help="rounds in a block (default: 500)")
    given = parser.parse_args()
    console = Console(width=WIDTH)
    what = f"{given.blocks} blocks of {given.rounds} rounds"
    machine.introduce(console, versions(Path(sys.executable), ["holdfast-train"]), what)
    with machine.ForeignCpu() as cpu:
        hop_s, word_s = hops(given.blocks * given.rounds), words(given.blocks * given.rounds)
        table = _table("us, on this machine")
        table.add_row("h, a hop", *_shown(hop_s))
        table.add_row("c, a word read or sent (processor)", *_shown(word_s))
        console.print(table)
        console.print(_large(hop_s, word_s))
        table = _table("a vote, us")
        tree = {"16 members: mesh": Team(16, 16), f"16 members: tree, k = {FAN_OUT}": Team(16, 16, FAN_OUT)}
        _compare(table, tree, given.blocks, given.rounds)
        for members in (2, 8) if given.before else ():
            versions_of = {"before": Team(members, members, 0, given.before), "now": Team(members, members)}
            small = {f"{members} members: {name}": team for name, team in versions_of.items()}
            _compare(table, small, given.blocks, given.rounds)
        console.print(table)
    machine.conclude(console, cpu)
    return 0


def _compare(table: Table, teams: dict[str, Team], blocks: int, rounds: int) -> None:
    for number in range(blocks):
        # Whoever comes second may find a warmer machine.
        for team in list(teams.values())[:: -1 if number % 2 else 1]:
            team.vote(rounds)
    for name, team in teams.items():
        table.add_row(name, *_shown(team.took_s))
        team.close()


# ---------------------------------------------------------------- a hop and a word


def hops(count: int) -> list[float]:
    """Seconds from a send to where a process that waits for it has it: half of the way there and back."""
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = fork.Process(target=_answer, args=(server.getsockname(),))
        other.start()
        sock, _ = server.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for _ in range(count):
            began = time.perf_counter()
            sock.sendall(b"0123456789abcdef")
            sock.recv(4096)
            took.append((time.perf_counter() - began) / 2)
    other.join()
    return took


def _answer(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := sock.recv(4096):
            sock.sendall(data)


def words(count: int) -> list[float]:
    """Seconds of a processor for each word that a parent of 8 reads or sends in a vote, when all words are there."""
    size = FAN_OUT + 1
    listeners = [ChannelListener("127.0.0.1", "bench", f"w{rank}") for rank in range(size)]
    members = tuple(
        Member(rank=r, worker=f"w{r}", node=f"n{r}", slot=0, host="127.0.0.1", vote_port=x.port)
        for r, x in enumerate(listeners)
    )
    root, *children = [TreeChannel(Generation(number=1, members=members), r, FAN_OUT) for r in range(size)]
    for channel in (*children, root):
        channel.connect(listeners[channel.rank], "bench")
    message, took = (1.0, 0.0, 0.0), []
    for step in range(count):
        for child in children:
            child.send_vote(step, message)
        began = time.thread_time()
        root.send_vote(step, message)
        root.receive_vote(step, [message])
        took.append((time.thread_time() - began) / (2 * FAN_OUT))
        for child in children:
            child.receive_vote(step, [message])
    for channel in (root, *children):
        channel.close()
    for listener in listeners:
        listener.close()
    return took


# ---------------------------------------------------------------- a large job


def levels(nodes: int, fan_out: int) -> int:
    """Hops from the root to the furthest leader."""
    count, width, reached = 0, 1, 1
    while reached < nodes:
        width *= fan_out
        reached += width
        count += 1
    return count


def vote_s(nodes: int, fan_out: int, hop_s: float, word_s: float) -> float:
    """A vote: up and down, one hop within a node and one for each level; and on the way each leader reads the words of its
    children, and sends to them. The words of a node's others are read by its leader while others do the same."""
    count = levels(nodes, fan_out)
    return 2 * (1 + count) * hop_s + 2 * (LOCAL - 1 + count * fan_out) * word_s


def _large(hop_s: Sequence[float], word_s: Sequence[float]) -> Table:
    table = Table(title=f"computed, k = {FAN_OUT}, ms", box=box.SIMPLE_HEAD, width=WIDTH)
    for name in ("nodes of 8", "levels", "h and c at p50", "h and c at p99.9"):
        table.add_column(name, justify="right")
    for nodes in LARGE:
        typical, slow = (
            1e3 * vote_s(nodes, FAN_OUT, at(hop_s), at(word_s)) for at in (_quantile(0.5), _quantile(0.999))
        )
        table.add_row(f"{nodes:,}", str(levels(nodes, FAN_OUT)), f"{typical:.2f}", f"{slow:.2f}")
    table.caption = (
        "A vote waits for the slowest of all members. With thousands of them some hop is beyond p99.9 in nearly every round, "
        "so a vote takes longer than at p50. Without the wire between nodes, and without what a training process does beside it."
    )
    return table


# ---------------------------------------------------------------- tables


def _quantile(share: float) -> Callable[[Sequence[float]], float]:
    return lambda took: sorted(took)[min(len(took) - 1, int(share * len(took)))]


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, width=WIDTH)
    table.add_column("")
    for name in ("p50", "p99", "p99.9", "mean"):
        table.add_column(name, justify="right")
    return table


def _shown(took: Sequence[float]) -> list[str]:
    found = [_quantile(share)(took) for share in (0.5, 0.99, 0.999)]
    return [f"{1e6 * s:.1f}" for s in (*found, sum(took) / len(took))]


if __name__ == "__main__":
    sys.exit(main())
