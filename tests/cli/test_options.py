"""Options are declared once, at the fields of a dataclass, and Typer reads them there."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer

from holdfast.cli.options import command, given_flags
from holdfast.errors import UsageError
from holdfast.protocol.options import Argument, Option, OptionGroup, check, declared


@dataclass(frozen=True, kw_only=True)
class Inner:
    share: Annotated[float, Option(least=0, most=1, unit="parts", example="0.5", help="A share.")] = 0.25
    kind: Annotated[str, Option(names=("--sort",), choices=("tall", "small"), help="A kind.")] = "tall"


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: Annotated[str, Argument(help="A name.")]
    more: Annotated[tuple[Path, ...], Option(help="Files.", metavar="FILE")] = ()
    loud: Annotated[bool, Option(help="Loud.")] = False
    nothing: Annotated[int | None, Option(help="A number.", default="a guess")] = None
    inner: Annotated[Inner, OptionGroup("The inner ones")] = field(default_factory=Inner)


@pytest.fixture
def call(monkeypatch, capfd):
    """What a command gets when it is called with these words; or what it prints."""

    def call(*words: str):
        got = []

        def show(options: Outer, plain: Annotated[int, typer.Option("--plain")] = 3) -> None:
            got.append((options, plain))

        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(command(show))
        monkeypatch.setattr(sys, "argv", ["show", *words])
        with pytest.raises(SystemExit):
            app()
        return got[0] if got else capfd.readouterr().out

    return call


def test_what_is_not_given_keeps_its_default(call):
    assert call("x") == (Outer(name="x"), 3)


def test_all_of_it(call):
    options, plain = call(
        "--more", "a", "--more", "b", "--loud", "--nothing", "2", "--share", "1", "--sort", "small",
        "--plain", "4", "x",
    )  # fmt: skip
    wanted = Outer(
        name="x", more=(Path("a"), Path("b")), loud=True, nothing=2, inner=Inner(share=1, kind="small")
    )
    assert (options, plain) == (wanted, 4)


def test_help_shows_groups_and_defaults(call):
    shown = call("--help")
    assert "The inner ones" in shown
    assert "tall|small" in shown
    assert "a guess" in shown
    assert shown.index("--loud") < shown.index("The inner ones") < shown.index("--share")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Inner(share=-0.5), "--share must be between 0 and 1 parts (got -0.5), for example 0.5"),
        (Inner(share=2), "--share must be between 0 and 1 parts (got 2), for example 0.5"),
        (Inner(share=float("nan")), "--share must be between 0 and 1 parts (got nan), for example 0.5"),
        (Inner(kind="odd"), "--sort must be tall or small (got 'odd')"),
        (Outer(name="x", inner=Inner(kind="odd")), "--sort must be tall or small (got 'odd')"),
    ],
)
def test_limits(options, words):
    with pytest.raises(UsageError) as refused:
        check(options)
    assert str(refused.value) == words


def test_the_limits_are_checked_before_the_command_runs():
    ran = []

    def show(options: Inner) -> None:
        ran.append(options)

    with pytest.raises(UsageError, match="--share must be between 0 and 1"):
        command(show)(share=7.0, kind="tall")
    assert not ran


def test_names_of_the_flags_that_were_given():
    usual = Inner(kind="tall")
    assert given_flags(Inner(kind="small"), usual) == ("--sort",)
    assert given_flags(Inner(share=1, kind="small"), usual) == ("--share", "--sort")
    assert given_flags(usual, usual) == ()


def test_a_name_that_is_declared_twice():
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        share: Annotated[float, Option(help="Another share.")] = 0.5
        inner: Inner = field(default_factory=Inner)

    with pytest.raises(AssertionError, match="twice"):
        declared(Twice)


def test_help_of_a_run_has_what_people_use_and_all_of_it_on_request(holdfast):
    short, whole = (holdfast("run", option).out for option in ("--help", "--help-all"))
    assert "<bool>" not in short + whole
    shown, declared_ones = (len(re.findall(r"^│ --", text, re.MULTILINE)) for text in (short, whole))
    assert 15 <= shown <= 24
    for option in ("--nnodes", "--spares", "--fault", "--checkpoint", "--engine", "--help-all"):
        assert option in short
    assert "--blast-radius" in whole
    assert "--blast-radius" not in short
    assert f"{declared_ones - shown} more options" in short
    assert holdfast("run", "--help").out == short, "nothing stays hidden, or shown"


@pytest.mark.parametrize("asked", ["run --gpu-hours 10000", "simulate --days 1 --trials 1"])
def test_plans_take_nnodes_as_a_run_does(asked, holdfast):
    command = ("plan", *asked.split(), "--rate", "0.1%", "--json")
    assert holdfast(*command, "--nnodes", "16").out == holdfast(*command, "--nodes", "16").out != ""
