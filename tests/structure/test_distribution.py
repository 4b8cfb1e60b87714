"""The distribution is `holdfast-train`; another project's `holdfast` in the same environment is named."""

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import holdfast
from holdfast import distribution

ROOT = Path(__file__).parents[2]


def test_the_name_is_that_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (distribution.NAME, holdfast.__version__)


def test_no_document_and_no_message_installs_the_other_project():
    files = [
        p
        for folder in ("docs", "src", "examples")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".md", ".py")
    ]
    wrong = re.compile(r"pip install[^\n]*['\" ]holdfast(\[|['\" `]|$)", re.MULTILINE)
    found = [p for p in [ROOT / "README.md", *files] if wrong.search(p.read_text())]
    assert found == []


@pytest.fixture
def installed(tmp_path):
    """A folder of installed packages with this one in it."""
    folder = tmp_path / "site-packages"
    (folder / "holdfast").mkdir(parents=True)
    (folder / "holdfast_train-0.1.0.dist-info").mkdir()
    (folder / "holdfast_other-1.0.dist-info").mkdir()
    return folder


def test_the_other_project_beside_this_one_is_named_with_the_way_out(installed):
    (installed / "holdfast-2.3.dist-info").mkdir()
    words = r"holdfast 2\.3 is installed in .*site-packages, too\. .*pip uninstall holdfast"
    with pytest.warns(RuntimeWarning, match=words):
        distribution.warn_of_stranger(str(installed / "holdfast" / "__init__.py"))


def test_nothing_is_said_where_this_one_is_alone(installed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribution.warn_of_stranger(str(installed / "holdfast" / "__init__.py"))
        # A checkout, in which a build may have left anything.
        distribution.warn_of_stranger(str(installed.parent / "src" / "holdfast" / "__init__.py"))
    assert distribution.stranger("/no such folder") is None


def test_the_command_says_that_the_package_was_replaced():
    """The other project's `holdfast/__init__.py` came later than ours."""
    script = (
        "import sys, holdfast\n"
        "del holdfast.__all__\n"
        "from holdfast.cli.app import main\n"
        "sys.argv = ['holdfast', '--version']\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "does not belong to holdfast-train" in ran.stderr
    assert "pip uninstall holdfast" in ran.stderr
