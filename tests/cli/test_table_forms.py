"""`-o wide|json|yaml` of every command that prints a table: which ones these are is read from the sources."""

from __future__ import annotations

import ast
import inspect
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from test_checkpoint import spec
from test_finished_job import write_job
from typer.core import TyperCommand

from holdfast import plugins
from holdfast.cli import check
from holdfast.coordinator.kernel.history import RecordKind
from holdfast.coordinator.service.history_store import FILE_NAME, HistoryRecord, HistoryStore
from holdfast.data.samples import SampleLedger
from holdfast.engines.jobs import JobFolder
from holdfast.protocol.health import CheckResult, Condition
from holdfast.tools.simulate import validation

SOURCES = Path(check.__file__).parents[1]
LOOKED_AT = ("cli", "observe")
TABLE = ("rich.table", "Table")
LIVE = {
    "run": "a view that changes while the job runs, and its end; `report` is for programs",
    "attach": "the same",
}


# ---------------------------------------------------------------- which commands print a table


@cache
def tree(module: str) -> ast.Module | None:
    path = SOURCES.parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text()) if path.exists() else None


def imports(nodes: Iterator[ast.AST]) -> dict[str, tuple[str, str]]:
    """Name to the module and name that it stands for; '' for a module itself."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                found[one.asname or one.name] = (
                    (inner, "") if tree(inner) is not None else (node.module, one.name)
                )
    return found


@cache
def uses(module: str, name: str) -> frozenset[tuple[str, str]]:
    """What a function or class of these folders names, itself or in what it imports."""
    parsed = tree(module)
    if parsed is None or module.split(".")[1:2] not in [[folder] for folder in LOOKED_AT]:
        return frozenset()
    own = {
        n.name: n for n in parsed.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    if name not in own:
        return frozenset()
    known = {n: (module, n) for n in own} | imports(iter(parsed.body)) | imports(ast.walk(own[name]))
    found = set()
    for node in ast.walk(own[name]):
        if isinstance(node, ast.Name) and node.id in known:
            found.add(known[node.id])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of, within = known.get(node.value.id, ("", "no module"))
            if not within:
                found.add((of, node.attr))
    return frozenset(found - {(module, name)})


def prints_table(module: str, name: str) -> bool:
    seen, ahead = set(), [(module, name)]
    while ahead:
        one = ahead.pop()
        if one == TABLE:
            return True
        if one not in seen:
            seen.add(one)
            ahead += uses(*one)
    return False


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command, and every group that is one by itself."""
    for name, point in plugins.ours(plugins.COMMANDS).items():
        found = point.load()
        if isinstance(found, typer.Typer):
            yield from commands_below(found, name)
        elif not isinstance(found, TyperCommand):
            yield name, found


def commands_below(of: typer.Typer, group: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    if of.registered_callback is not None and of.registered_callback.callback is not None:
        yield group, of.registered_callback.callback
    for info in of.registered_commands:
        assert info.callback is not None
        yield f"{group} {info.name}", info.callback


TABLES = {
    name: callback
    for name, callback in commands()
    if name not in LIVE and prints_table(callback.__module__, callback.__name__)
}


# ---------------------------------------------------------------- what each is tried on


def jobs(home: Path) -> None:
    write_job("done")


def saved(home: Path) -> None:
    import torch

    from holdfast.checkpoint.policy import Retention
    from holdfast.train import restore, state_image

    folder = JobFolder("done")
    folder.prepare(spec(folder))
    image = state_image.capture({"net": torch.nn.Linear(3, 2)}, 4)
    restore.save(image, str(folder.path / "checkpoint"), Retention())
    folder.close()


def history(home: Path) -> None:
    home.mkdir()
    kept = HistoryStore(str(home / FILE_NAME))
    kept.add(
        HistoryRecord(
            utc_s=1.7e9, machine="serial:X1", node="node2", job="a", kind=RecordKind.INCIDENT, rule="xid-79",
            text="xid-79: gone",
        )
    )  # fmt: skip
    kept.close()


def samples(home: Path) -> None:
    ledger = SampleLedger("given", "first", 10, 8, 8)
    ledger.giving(1, 0, 0, {0: np.arange(8)})
    ledger.committed(1, 0)
    ledger.close()


def topology(home: Path) -> None:
    Path("topology.yaml").write_text("".join(f"n{i} h{i // 4}/r{i // 2}\n" for i in range(8)))


def past(home: Path) -> None:
    goodput = {"wall_s": 7200.0, "classes": {"productive": 7000.0, "detect": 200.0}, "share": 0.97}
    report = {"job": "past", "incidents": [], "world": {"history": [[0.0, 8]]}, "goodput": goodput}
    Path("past.json").write_text(json.dumps(report))


def nothing(home: Path) -> None:
    pass


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "check": ("", nothing),
    "checkpoint ls": ("", saved),
    "checkpoint show": ("", saved),
    "data samples": ("given", samples),
    "health rules": ("--source kmsg", nothing),
    "ls": ("", jobs),
    "node ls": ("", history),
    "node show": ("X1", history),
    "plan": ("--global-batch 64 --micro-batch 8 --nnodes 1:9", nothing),
    "plan calibrate": ("past.json", past),
    "plan division": ("--global-batch 64 --micro-batch 8 --nnodes 1:9", nothing),
    "plan memory": (
        "--parameters 8B --layers 32 --hidden 4096 --vocabulary 128000 --seq-len 8192",
        nothing,
    ),
    "plan placement": ("--topology topology.yaml", topology),
    "plan run": ("--nodes 16 --gpu-hours 10000 --rate 0.1%", nothing),
    "plan simulate": ("--nodes 4 --days 1 --rate 0.1% --trials 1", nothing),
    "plan tables": ("", nothing),
    "plan validate": ("", nothing),
    "report": ("", jobs),
    "status": ("", jobs),
}
"""Of each command what it is given here, and what has to be there before."""
MOVES = ("utc", "age_s")
"""Fields that follow the clock."""


def steady(value: Any) -> Any:
    """Without what the clock moves; a figure that JSON has no word for is null there."""
    if isinstance(value, dict):
        return {str(k): steady(v) for k, v in value.items() if k not in MOVES}
    if isinstance(value, list):
        return [steady(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def test_every_command_that_prints_a_table_is_tried_here() -> None:
    assert set(CASES) == set(TABLES)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_has_all_forms(name, holdfast, home, monkeypatch) -> None:
    found = CheckResult(name="disk", condition=Condition.HEALTHY, value=3.0, unit="GB/s", detail="d" * 200)
    monkeypatch.setattr(check, "_of_machine", lambda *_: [found])
    # Once for all forms: the simulations behind it take most of a minute for six of them.
    monkeypatch.setattr(validation, "validate", cache(validation.validate))
    given, prepare = CASES[name]
    prepare(home)
    command = [*name.split(), *given.split()]
    plain, wide = holdfast(*command), holdfast(*command, "-o", "wide")
    told, also = holdfast(*command, "-o", "json"), holdfast(*command, "-o", "yaml")
    assert {wide.code, told.code, also.code} == {plain.code}, plain.err + told.err
    assert plain.code == 0
    value = json.loads(told.out)
    assert steady(yaml.safe_load(also.out)) == steady(value)
    flag = ("--json", "-") if name == "check" else ("--json",)
    assert steady(json.loads(holdfast(*command, *flag).out)) == steady(value)
    # Nothing is folded, so no row needs a second line.
    assert 0 < len(wide.out.splitlines()) <= len(plain.out.splitlines())
    assert holdfast(*command, "-o", "xml").code == 2


def test_what_prints_json_does_it_by_the_same_option() -> None:
    having = [(name, inspect.signature(call).parameters) for name, call in commands() if name != "check"]
    asked = {name for name, parameters in having if "as_json" in parameters}
    assert len(asked) > 15
    assert {name for name, parameters in having if "output" in parameters} >= asked


def test_a_rule_is_explained_in_all_forms(holdfast) -> None:
    told, also = (holdfast("health", "explain", "xid-79", "-o", form).out for form in ("json", "yaml"))
    assert json.loads(told) == yaml.safe_load(also) != []
    assert told == holdfast("health", "explain", "xid-79", "--json").out
