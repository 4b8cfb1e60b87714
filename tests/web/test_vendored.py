"""Files of others are theirs byte for byte, and our own write text nodes only."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from holdfast.web import application

STATIC = Path(application.__file__).parent / "static"
VENDOR = STATIC / "vendor"
OURS = sorted(STATIC.glob("*.js"))
PACKAGES = tomllib.loads((VENDOR / "vendor.toml").read_text())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_as_its_makers_published_it(name: str) -> None:
    package = PACKAGES[name]
    folder = VENDOR / f"{name}-{package['version']}"
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    assert found == package["files"]
    assert "LICENSE" in found
    assert package["license"] in ("MIT", "Apache-2.0")


def test_nothing_else_is_there() -> None:
    assert {p.name for p in VENDOR.iterdir()} == {f"{n}-{p['version']}" for n, p in PACKAGES.items()} | {
        "vendor.toml"
    }


def test_every_file_that_the_page_names_is_there() -> None:
    for path in (*application.IMPORTS.values(), application.UPLOT, *application.STYLES, "static/start.js"):
        assert application.file_of(path), path


def test_every_module_imports_by_a_name_of_the_map() -> None:
    assert len(OURS) >= 6
    for path in OURS:
        for name in re.findall(r'^import .* from "(.*)";$', path.read_text(), re.M):
            assert name in application.IMPORTS, (path.name, name)


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.name)
def test_ours_write_text_and_run_none(path: Path) -> None:
    """What a job says comes from strangers: it is shown as text, and nothing is made of it that runs or loads."""
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|javascript:|dangerouslySet|srcdoc|https?://"
    assert re.findall(forbidden, path.read_text()) == []


def test_the_page_is_small() -> None:
    """Uncompressed, with everything of others. The map of a simulated cluster is loaded where there is one."""
    files = {*application.IMPORTS.values(), application.UPLOT, *application.STYLES}
    simulated = {path for path in files if "simulated" in path}
    assert sum(len(application.file_of(path) or b"") for path in files - simulated) < 170_000
    assert sum(len(application.file_of(path) or b"") for path in simulated) < 15_000


@pytest.mark.parametrize(
    "path",
    [
        "static/../application.py",
        "static//page.css",
        "../web/views.py",
        "static/vendor",
        "static\\page.css",
        "x" * 300,
    ],
)
def test_no_other_file_is_served(path: str) -> None:
    assert application.file_of(path) is None
