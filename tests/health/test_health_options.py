"""What `holdfast run` is told about health."""

import sys
from pathlib import Path

import pytest

from holdfast.cli.spec import plan_health
from holdfast.errors import UsageError
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.units import parse_share


def script(folder: Path, name: str, mode: int = 0o755, text: str = "#!/bin/sh\n") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def test_nothing_given_is_the_default():
    assert plan_health(HealthSpec()) == HealthSpec()


@pytest.mark.parametrize(("text", "share"), [("25%", 0.25), ("0.1", 0.1), ("100%", 1.0), ("1", 1.0)])
def test_shares(text, share):
    assert parse_share("--blast-radius", text) == share


@pytest.mark.parametrize("text", ["0", "2", "-1", "half", "101%", ""])
def test_shares_refused(text):
    with pytest.raises(UsageError, match="--blast-radius"):
        parse_share("--blast-radius", text)


def test_files_are_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "before-join")
    spec = plan_health(HealthSpec(history="nodes.sqlite", hooks=".", deep_checks=True))
    assert (spec.history, spec.hooks, spec.deep_checks) == (
        str(tmp_path / "nodes.sqlite"),
        str(tmp_path),
        True,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (HealthSpec(rules=("none.toml",)), "none.toml cannot be read"),
        (HealthSpec(dry_run=("no-such-rule",)), "there is no rule named 'no-such-rule'"),
        (HealthSpec(watch=False, dry_run=("*",)), "--no-health"),
        (HealthSpec(history="mysql://x/y"), "postgresql://"),
        (HealthSpec(history="none/nodes.sqlite"), "does not exist"),
        (HealthSpec(hooks="none"), "this folder does not exist"),
    ],
)
def test_refused(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        plan_health(given)


@pytest.mark.parametrize(
    ("name", "mode", "text", "message"),
    [
        ("other", 0o755, "x", "does not contain any of on-create, before-join"),
        ("on-drain", 0o755, "", "on-drain is empty"),
        ("after-job", 0o644, "x", "after-job is not executable; run `chmod"),
    ],
)
def test_hooks_refused(tmp_path, name, mode, text, message):
    script(tmp_path, name, mode, text)
    with pytest.raises(UsageError, match=message):
        plan_health(HealthSpec(hooks=str(tmp_path)))


def test_a_hook_time_out_that_is_none(tmp_path, monkeypatch):
    script(tmp_path, "on-create")
    monkeypatch.setenv("HOLDFAST_HOOK_TIMEOUT_S", "soon")
    with pytest.raises(UsageError, match="HOLDFAST_HOOK_TIMEOUT_S='soon'"):
        plan_health(HealthSpec(hooks=str(tmp_path)))


def test_the_command_line_refuses_before_anything_starts(tmp_path, monkeypatch, capsys):
    from holdfast.cli.app import main

    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("")
    arguments = [
        "run",
        "--hooks",
        str(tmp_path / "none"),
        "--blast-radius",
        "25%",
        str(tmp_path / "train.py"),
    ]
    monkeypatch.setattr(sys, "argv", ["holdfast", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "this folder does not exist" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_slowness_that_noise_may_be_is_refused():
    with pytest.raises(UsageError, match="cannot be told from noise"):
        plan_health(HealthSpec(replace_slow=1.05))
    assert plan_health(HealthSpec(replace_slow=1.3)).replace_slow == 1.3
    assert plan_health(HealthSpec(dry_run=("slow-rank", "part-*"))).dry_run == (
        "slow-rank",
        "part-*",
    )
