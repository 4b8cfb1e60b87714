"""What is in a recipe's folder beside its files: manifests, scripts, and the arithmetic of its README."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kubejobs import accept

from holdfast.cli.app import main as cli
from holdfast.kubernetes.objects.render import job_spec

RECIPES = Path(__file__).parents[2] / "recipes"
FOLDERS = sorted(path.parent for path in RECIPES.glob("*/tiny.toml"))
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
PLANNED = re.compile(r"```sh excerpt\n(holdfast plan memory .*)\n```\n\n```text\n((?:.*\n)*?)```")


def test_there_are_five():
    assert len(FOLDERS) == 5


@each_folder
def test_the_job_file_is_one_that_the_operator_takes(folder):
    job = msgspec.yaml.decode((folder / "kubernetes.yaml").read_bytes())
    spec = job_spec(accept(job))
    assert (RECIPES.parent / spec.script).is_file()
    assert all((RECIPES.parent / file).is_file() for file in spec.args)
    assert spec.nproc == 8


@each_folder
def test_the_script_for_slurm_gives_options_that_exist(folder, tmp_path):
    """What it would run is shown by a `holdfast` of the test's own."""
    shown = tmp_path / "holdfast"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(
        [folder / "slurm.sh", "--dry-run"], env=environment, capture_output=True, text=True, check=True
    )
    *options, script, file = ran.stdout.splitlines()
    assert (RECIPES.parent / script).is_file()
    assert (RECIPES.parent / file).is_file()
    assert {word for word in options if word.startswith("--")} <= set(_options_of_run())


def _options_of_run():
    import typer

    from holdfast.cli.app import app

    command = typer.main.get_command(app).get_command(None, "run")
    return [name for parameter in command.params for name in parameter.opts]


@each_folder
def test_the_memory_that_its_readme_has_is_what_the_planner_says(folder, capsys, monkeypatch):
    found = PLANNED.findall((folder / "README.md").read_text())
    assert found
    for command, printed in found:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as ended:
            cli()
        assert ended.value.code in (0, None)
        assert capsys.readouterr().out == printed
