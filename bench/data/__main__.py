"""`python -m bench.data`: the first batch after a resume, and tokens per second of the loader alone (see --help)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.data.environments import LOADERS, PEERS, STREAMING
from bench.data.measure import BATCH, SEQ_LEN, positions
from bench.progress import Progress
from bench.recovery.analyse import Spread, spread
from bench.recovery.environments import ROOT, Environment, InstallError, create, versions

SCRIPT = Path(__file__).with_name("measure.py")
WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class System:
    """A loader, and what is measured of it."""

    name: str
    title: str
    environment: Environment | None = None
    resumes: bool = True
    runs: bool = True
    needs: str | None = None
    """What `measure.py prepare` is asked for first."""

    @property
    def python(self) -> Path:
        return self.environment.python if self.environment else Path(sys.executable)


SYSTEMS = (
    System(name="plain", title="plain loop over a memmap", resumes=False),
    System(name="tight", title="the same, one conversion per batch", resumes=False),
    System(name="holdfast", title="Holdfast, TokenDataset"),
    System(name="holdfast-2", title="Holdfast, shuffled(workers=2)", resumes=False),
    System(name="torchdata", title="StatefulDataLoader, map-style", environment=LOADERS, needs="torchdata"),
    System(name="torchdata-2", title="StatefulDataLoader, 2 workers", environment=LOADERS, resumes=False),
    System(
        name="torchdata-stream",
        title="StatefulDataLoader, stream without state",
        environment=LOADERS,
        runs=False,
    ),
    System(
        name="datasets", title="HF datasets, stream: shuffle, skip", environment=LOADERS, needs="datasets"
    ),
    System(
        name="datasets-map",
        title="HF datasets, map-style",
        environment=LOADERS,
        resumes=False,
        needs="datasets",
    ),
    System(name="streaming", title="MosaicML Streaming", environment=STREAMING, needs="streaming"),
)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = ", ".join(system.name for system in SYSTEMS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.data",
        description="Resuming anywhere in a large token set, and reading it, with Holdfast and its peers.",
    )
    parser.add_argument("--setup", action="store_true", help="install the peers that are not there, then run")
    parser.add_argument("--systems", help=f"comma-separated (default: all): {names}")
    parser.add_argument(
        "--tokens", type=float, default=1e9, help="tokens in the data set, a sparse file (default: 1e9)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="repetitions, each in a new process (default: 5)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of reading in each (default: 3)")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="limit for one measurement (default: 300)"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    chosen = parser.parse_args(arguments)
    known = {system.name: system for system in SYSTEMS}
    asked = chosen.systems.split(",") if chosen.systems else list(known)
    if set(asked) - set(known):
        parser.error(f"there is no {(set(asked) - set(known)).pop()!r}; there are {names}")
    chosen.systems = [known[name] for name in asked]
    return chosen


class Failed(Exception):
    """A measurement failed. The message is for the user."""


class Bench:
    """Runs measurements, each in a process of its own, on one set of data."""

    def __init__(self, tokens: int, timeout_s: float) -> None:
        self.folder = ROOT / "out" / "data" / str(tokens)
        self._timeout_s = timeout_s
        self._progress = Progress()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count = (tokens - 1) // SEQ_LEN
        path = self.folder / "tokens.npy"
        if not path.exists():
            part = path.with_suffix(".part")
            np.lib.format.open_memmap(part, mode="w+", dtype=np.uint16, shape=(tokens,)).flush()
            part.rename(path)
        with path.open("rb") as file:  # into the page cache, where every loader finds it
            while file.read(64 << 20):
                pass

    def prepare(self, system: System) -> None:
        done = self.folder / f"{system.needs}.ready"
        if system.needs is not None and not done.exists():
            self._run(system, "prepare", system.needs)
            done.touch()

    def resume(self, system: System, position: int) -> float:
        return float(self._run(system, "resume", system.name, str(position))["seconds"])

    def speed(self, system: System, seconds: float) -> float:
        return float(self._run(system, "speed", system.name, str(seconds))["tokens_per_s"])

    def _run(self, system: System, what: str, name: str, *rest: str) -> dict[str, float]:
        self._progress(f"{system.title}: {what} {' '.join(rest)}")
        command = [system.python, SCRIPT, what, name, self.folder, *rest]
        path = f"{ROOT / 'src'}:{ROOT}" if system.environment is None else ""
        env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        try:
            done = subprocess.run(
                [str(word) for word in command],
                capture_output=True,
                text=True,
                env=env,
                check=False,
                timeout=self._timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"not done within {self._timeout_s:.0f} s") from error
        if done.returncode:
            raise Failed(" | ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> int:
    chosen = options()
    console = Console(width=WIDTH)
    if chosen.setup:
        for environment in PEERS:
            console.print(f"Setting up {environment.folder.name} …")
            try:
                create(environment)
            except InstallError as error:
                console.print(f"  failed: {error}", style="red", markup=False)
    found = versions(Path(sys.executable), ["torch", "numpy"])
    for environment in PEERS:
        if environment.trouble() is None:
            found |= versions(environment.python, environment.packages)
    machine.introduce(
        console, found, f"{chosen.tokens:.3g} tokens, uint16, samples of {SEQ_LEN}, batches of {BATCH}"
    )
    bench = Bench(int(chosen.tokens), chosen.timeout_s)
    places = positions(bench.count)
    raw: dict[str, dict[str, list[float]]] = {}
    troubles: dict[str, str] = {}
    with machine.ForeignCpu() as cpu:
        for system in chosen.systems:
            trouble = system.environment.trouble() if system.environment else None
            try:
                if trouble is not None:
                    raise Failed(trouble)
                raw[system.name] = _measured(bench, system, chosen, places)
            except Failed as error:
                troubles[system.name] = str(error)
    console.print(_table(chosen, raw, troubles, places))
    for name, trouble in troubles.items():
        console.print(f"{name}: {trouble}", style="red", markup=False)
    console.print(
        "Seconds from opened files and a loaded state to the first batch, imports not counted, at a position of the "
        f"epoch; median and (min–max) of {chosen.repetitions} new processes. Tokens per second of one process that "
        "does nothing else, in the page cache.",
        style="dim",
    )
    console.print(f"{cpu.share:.0%} of the CPU went to other processes", highlight=False)
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"machine": asdict(machine.describe()) | found, "runs": raw}, indent=1)
        )
    return 1 if troubles else 0


def _measured(
    bench: Bench, system: System, chosen: argparse.Namespace, places: Sequence[int]
) -> dict[str, list[float]]:
    bench.prepare(system)
    times = range(chosen.repetitions)
    values: dict[str, list[float]] = {}
    if system.resumes:
        for place in places:
            values[str(place)] = [bench.resume(system, place) for _ in times]
    if system.runs:
        values["tokens_per_s"] = [bench.speed(system, chosen.seconds) for _ in times]
    return values


def _table(
    chosen: argparse.Namespace,
    raw: dict[str, dict[str, list[float]]],
    troubles: dict[str, str],
    places: Sequence[int],
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, width=WIDTH)
    table.add_column("loader")
    for share in ("0%", "50%", "99.9%"):
        table.add_column(f"first batch\nat {share}, s", justify="right", no_wrap=True)
    table.add_column("million\ntokens/s", justify="right", no_wrap=True)
    table.add_column("of the\nplain loop", justify="right", no_wrap=True)
    floor = spread(raw.get("plain", {}).get("tokens_per_s", []))
    for system in chosen.systems:
        values = raw.get(system.name)
        if values is None:
            table.add_row(system.title, *["failed" if system.name in troubles else ""] * 5)
            continue
        speeds = spread(values.get("tokens_per_s", []))
        table.add_row(
            system.title,
            *(_cell(spread(values.get(str(place), [])), 1.0, 3) for place in places),
            _cell(speeds, 1e-6, 1),
            f"{speeds.median / floor.median:.0%}" if speeds and floor else "",
        )
    return table


def _cell(found: Spread | None, scale: float, digits: int) -> str:
    if found is None:
        return ""
    low, median, high = (f"{value * scale:.{digits}f}" for value in (found.low, found.median, found.high))
    return f"{median}\n[dim]{low}–{high}[/dim]"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
