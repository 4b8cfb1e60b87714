"""`python -m bench.gpu`: what one GPU can show of snapshots and of recovery in process.

copies: a snapshot from the device into host memory, against a plain copy into pinned memory, and what a loop of matrix
products loses meanwhile. replicas, hsdp: a job whose workers share the GPU over gloo; one is killed, again and again: do the
others keep process, CUDA context and tensors, how long does it take, and does a bit of the loss curve change. steps: what a
step of one worker costs beside plain DDP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.gpu import copies, jobs, steps
from bench.overhead import jobs as overhead_jobs
from bench.overhead.analyse import Comparison
from bench.processes import Children, stop_signals
from bench.progress import Progress
from bench.recovery.analyse import spread
from bench.recovery.environments import versions
from holdfast.tensors import staging

WIDTH = 110
PARTS = ("copies", "steps", "replicas", "hsdp")
SHAPES = {
    "replicas": jobs.Shape("3 replicas of 1 worker", 3),
    "hsdp": jobs.Shape("HSDP, 2 replicas of 2 shards", 2, 2),
}
DEFAULTS = {"cuda": ("1g,8g", 8192, 2048), "cpu": ("64m", 512, 128)}
"""Sizes of snapshots, of matrix products, and of the job's model."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="What one GPU can show of snapshots and recovery."
    )
    parser.add_argument(
        "--device",
        choices=tuple(DEFAULTS),
        default="cuda",
        help="cpu: runs the same code without a GPU, to try it",
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--sizes", help="sizes of snapshots (default: 1g,8g; on the CPU 64m)")
    parser.add_argument("--repetitions", type=int, default=7, help="repetitions of every copy (default: 7)")
    parser.add_argument("--faults", type=int, default=5, help="faults in every job (default: 5)")
    parser.add_argument("--width", type=int, help="of the jobs' layers (default: 2048; on the CPU 128)")
    parser.add_argument(
        "--groups",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="auto: gloo, as the workers share the GPU; nccl: NCCL, which takes each for a machine of its own",
    )
    parser.add_argument("--keep", type=Path, help="keep the jobs' folders below this one")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    chosen = parser.parse_args(arguments)
    chosen.parts = chosen.parts.split(",")
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if chosen.repetitions < 1 or chosen.faults < 1:
        parser.error("--repetitions and --faults: at least 1")
    sizes, chosen.product, width = DEFAULTS[chosen.device]
    chosen.width = chosen.width or width
    try:
        chosen.sizes = [_size(word) for word in (chosen.sizes or sizes).lower().split(",")]
    except ValueError:
        parser.error("--sizes: for example 512m,1g")
    return chosen


def _size(word: str) -> int:
    units = {"m": 1 << 20, "g": 1 << 30}
    if word[-1:] not in units or int(word[:-1]) < 1:
        raise ValueError(word)
    return int(word[:-1]) * units[word[-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    console, progress = Console(width=WIDTH), Progress()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "There is no GPU that torch can use here: nothing was measured. `--device cpu` runs the same code on the CPU."
        )
        return 2
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device("cpu")
    if chosen.device == "cpu":
        staging.FAR.add("cpu")
        torch.set_num_threads(1)  # one core computes, one copies
    name = (
        torch.cuda.get_device_name(device) if chosen.device == "cuda" else "no GPU: the same code on the CPU"
    )
    machine.introduce(console, versions(Path(sys.executable), ["torch", "holdfast-train"]), name)
    raw: dict[str, object] = {"machine": asdict(machine.describe()), "device": name}
    done, cpu = True, machine.ForeignCpu()
    with stop_signals(), cpu, Children() as children:
        if "copies" in chosen.parts:
            found = []
            for size in chosen.sizes:
                progress(f"copies of {size >> 20} MiB")
                try:
                    found.append(copies.measure(size, device, chosen.repetitions, chosen.product))
                except (OSError, torch.OutOfMemoryError) as error:
                    done = False
                    console.print(f"{size >> 20} MiB: no room in {copies.MEMORY} or on the device: {error}")
            raw["copies"] = [asdict(f) for f in found]
            _print_copies(console, found, chosen.repetitions)
        if "steps" in chosen.parts:
            compared: dict[str, Comparison] = {}
            for case in steps.CASES:
                with children.group() as group:
                    try:
                        compared[case.name] = steps.measure(case, chosen.device, group, progress)
                    except (overhead_jobs.Failed, ValueError) as error:
                        done = False
                        console.print(str(error), style="red", markup=False)
            raw["steps"] = {name: asdict(one) for name, one in compared.items()}
            _print_steps(console, compared, chosen.device)
        table = _job_table(chosen)
        for part in [p for p in SHAPES if p in chosen.parts]:
            shape = SHAPES[part]
            setting = jobs.Setting(
                device=chosen.device,
                width=chosen.width,
                groups=chosen.groups,
                keep=chosen.keep / part if chosen.keep else None,
            )
            with children.group() as group:
                try:
                    outcome = jobs.measure(shape, chosen.faults, setting, group, progress)
                except jobs.Failed as error:
                    done = False
                    console.print(str(error), style="red", markup=False)
                    continue
            raw[part] = asdict(outcome)
            table.add_row(*_job_row(shape, outcome))
        if table.row_count:
            console.print(table)
    machine.conclude(console, cpu)
    if chosen.json:
        chosen.json.write_text(json.dumps(raw))
    return 0 if done else 1


def _print_copies(console: Console, found: Sequence[copies.Copies], repetitions: int) -> None:
    table = Table(
        title=f"Device to host: medians (min–max) of {repetitions} copies each",
        box=box.SIMPLE_HEAD,
        width=WIDTH,
    )
    for name in ("bytes", "way", "ms", "GB/s", "of a plain copy"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for one in found:
        plain = statistics.median(one.seconds[copies.PLAIN])
        for way, seconds in one.seconds.items():
            middle = statistics.median(seconds)
            table.add_row(
                f"{one.nbytes >> 20} MiB",
                way,
                _spread(seconds, 1e3, 1),
                f"{one.nbytes / middle / 1e9:.1f}",
                f"{middle / plain:.2f}",
            )
    console.print(table)
    for one in found:
        slot = "known to the driver after" if one.pinned else "refused by the driver, mapped after"
        slower = [b / a - 1 for a, b in zip(one.products["alone"], one.products["beside"], strict=True)]
        console.print(
            f"{one.nbytes >> 20} MiB: the slot was {slot} {one.known_s:.2f} s; matrix products beside copies take "
            f"{_spread(slower, 100, 1)} % longer ({_spread(one.products['alone'], 1e3, 2)} ms alone)",
            highlight=False,
        )


def _print_steps(console: Console, compared: dict[str, Comparison], device: str) -> None:
    size = steps.SIZES[device]
    table = Table(
        title=f"One worker, a transformer of {size.layers} layers of {size.width}, {size.batch} x {size.length} tokens: "
        f"{size.rounds} rounds of blocks of {size.steps} steps",
        box=box.SIMPLE_HEAD,
        width=WIDTH,
    )
    for name in ("Holdfast with", "plain DDP, ms", "Holdfast, ms", "extra, ms", "extra, %", "noise, ms"):
        table.add_column(name, justify="left" if name == "Holdfast with" else "right")
    for name, one in compared.items():
        table.add_row(
            name,
            f"{one.plain_s * 1e3:.2f}",
            f"{one.protected_s * 1e3:.2f}",
            f"{one.extra_s * 1e3:.2f} ({one.extra_low_s * 1e3:.2f}–{one.extra_high_s * 1e3:.2f})",
            f"{one.extra_share * 100:.1f}",
            f"{one.noise_s * 1e3:.2f}",
        )
    console.print(table)
    console.print(
        "A round: a block of plain DDP, one of Holdfast, one of plain DDP again. Medians; extra: with its quartiles. "
        "Plain DDP never waits for the GPU within a block.",
        style="dim",
    )


def _job_table(chosen: argparse.Namespace) -> Table:
    over = "NCCL, as between machines" if chosen.groups == "nccl" else "gloo"
    table = Table(
        title=f"SIGKILL of one worker, width {chosen.width} over {over}: medians (min–max) of {chosen.faults} faults each",
        box=box.SIMPLE_HEAD,
        width=WIDTH,
    )
    for name in (
        "job",
        "step, ms",
        "stall, s",
        "full strength, s",
        "survivors\nunchanged",
        "losses of the\nsame bits",
    ):
        table.add_column(name, justify="left" if name == "job" else "right")
    return table


def _job_row(shape: jobs.Shape, outcome: jobs.Outcome) -> list[str]:
    return [
        shape.name,
        f"{outcome.step_s * 1e3:.1f}",
        _spread(outcome.stall_s, 1, 2),
        _spread(outcome.full_s, 1, 2),
        f"{outcome.kept} of {outcome.survivors}",
        f"{outcome.equal} of {outcome.steps}",
    ]


def _spread(values: Sequence[float], scale: float, digits: int) -> str:
    found = spread(values)
    if found is None:
        return "–"
    middle, low, high = (f"{x * scale:.{digits}f}" for x in (found.median, found.low, found.high))
    return f"{middle} ({low}–{high})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
