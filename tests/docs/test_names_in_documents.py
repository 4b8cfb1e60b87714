"""Names of the sources in README and pages: each exists, and the page of modules is complete.

A page that names a module, class or function which was renamed since leads a contributor nowhere, and nobody notices for
months. So every name in code marks that looks like one of ours is looked up in the syntax trees.
"""

import ast
import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest
from test_blocks_of_documents import FENCE, PAGES, ROOT, name_of

from holdfast import plugins

PACKAGE = ROOT / "src" / "holdfast"
MODULES = ROOT / "docs" / "architecture" / "modules.md"
FOREIGN = {"Store", "ProcessGroup", "DataLoader", "DTensor", "megatron/core/datasets/indexed_dataset.py"}
"""Names of other projects."""
OBJECTS = {"run": "Run", "step": "Step", "state": "CoreState"}
"""What scripts and pages call the objects of these classes."""

_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?:[\w-]+/)*[\w-]+\.(?:py|toml|sh|md)")
# Not `holdfast.dev/fault`: labels and annotations of Kubernetes.
_DOTTED = re.compile(r"(?<![\w./-])holdfast(?!\.dev/)(?:\.\w+)+")
_ATTRIBUTE = re.compile(r"(\w+)\.(\w+)(?:\(.*\))?")
_CLASS = re.compile(r"[A-Z]\w*[a-z]\w*")
_SECTION = re.compile(r"^## .*?`(?P<folder>[\w/]+)/`.*\n(?P<text>(?:(?!## ).*\n)*)", re.MULTILINE)


def modules_in(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}


def code_of(page: Path) -> list[str]:
    return _CODE.findall(FENCE.sub("", page.read_text()))


@functools.cache
def attributes() -> dict[str, set[str]]:
    """Per class and per module (by its last name) of the package: the names that stand in its body."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names[path.stem] |= _names_in(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names[node.name] |= _names_in(node.body) | {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"
                }
    return names


def _names_in(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return names


@functools.cache
def files() -> set[str]:
    """The project's own files; what git ignores is none."""
    tops = ("src", "tests", "bench", "examples", "docs")
    paths = [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    return {str(p.relative_to(ROOT)) for p in [*paths, *ROOT.glob("*.*")]}


PAGE = pytest.mark.parametrize("page", [pytest.param(p, id=name_of(p)) for p in PAGES])


@PAGE
def test_every_file_that_a_page_names_exists(page):
    written_by_the_page = set(re.findall(r"file=(\S+)", page.read_text()))
    for code in code_of(page):
        if _FILE.fullmatch(code) and "/" in code and code not in FOREIGN | written_by_the_page:
            assert any(f"/{name}".endswith(f"/{code}") for name in files()), code


@PAGE
def test_every_dotted_name_of_the_package_exists(page):
    """`holdfast.data.local`, `python -m holdfast.agent`: also in excerpts, which nothing runs."""
    for name in _DOTTED.findall(page.read_text()):
        resolve(name)


def test_every_public_name_has_its_reference():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for package in ("holdfast", "holdfast.data", "holdfast.checkpoint"):
        for name in importlib.import_module(package).__all__:
            assert f":: {package}.{name}\n" in page or f":: {package}.{name}." in page, f"{package}.{name}"


def resolve(name: str) -> None:
    if name in (plugins.ENGINES, plugins.TRACKERS, plugins.CHECKS, plugins.COMMANDS):
        return  # a group of entry points
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is not None and not error.name.startswith("holdfast"):
                return  # the module is there, and needs a library that only tests of its own environment have
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return
    raise AssertionError(name)


@PAGE
def test_every_attribute_of_a_class_of_ours_exists(page):
    """`Hello.checks`, `run.mesh()`; on the pages of the architecture also `policy.resolve`, a function of a module."""
    for code in code_of(page):
        match = _ATTRIBUTE.fullmatch(code)
        owner = OBJECTS.get(match[1], match[1]) if match else ""
        if owner in attributes() and (owner[0].isupper() or "architecture" in name_of(page)):
            assert match[2] in attributes()[owner] or _FILE.fullmatch(code), code


@pytest.mark.parametrize("page", [p for p in PAGES if "architecture" in name_of(p)], ids=name_of)
def test_every_class_that_the_architecture_names_exists(page):
    for code in code_of(page):
        name = code.partition(".")[0].partition("(")[0]
        if _CLASS.fullmatch(name) and name not in FOREIGN:
            assert name in attributes(), code


def test_the_page_of_modules_has_every_module_once():
    named = {}
    for section in _SECTION.finditer(MODULES.read_text()):
        cells = re.findall(r"^\| (`.*?) \|", section["text"], re.MULTILINE)
        named[section["folder"]] = sorted(name for cell in cells for name in _CODE.findall(cell))
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    wanted = {str(f.relative_to(PACKAGE)): sorted(modules_in(f)) for f in folders if modules_in(f)}
    wrong = {
        folder: {
            "not on the page": sorted(set(wanted.get(folder, ())) - set(named.get(folder, ()))),
            "not in the sources": sorted(set(named.get(folder, ())) - set(wanted.get(folder, ()))),
            "twice": sorted({n for n in named.get(folder, ()) if named[folder].count(n) > 1}),
        }
        for folder in wanted | named
        if wanted.get(folder) != named.get(folder)
    }
    assert not wrong, f"docs/architecture/modules.md: {wrong}"
