"""The figures of the sources: circles are found where they are, and counted by what runs the import."""

import ast
import re
from pathlib import Path

import figures
from imports import AT_RUN_TIME, EVERY, LOADED, Import, arrows, circles, imports_of, modules_of


def tree(folder: Path, **sources: str) -> list[Import]:
    package = folder / "house"
    for name, text in sources.items():
        path = package.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    return imports_of(modules_of(package))


def test_an_import_counts_by_what_runs_it(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        a="import house.b\n",
        b="def late():\n    from house import c\n",
        c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import thing\n",
    )
    kinds = {(one.importer, one.imported): one.kind for one in found}
    assert kinds == {
        ("house.a", "house.b"): "loaded",
        ("house.b", "house.c"): "called",
        ("house.c", "house.a"): "types",
    }
    assert circles(arrows(found, {LOADED})) == circles(arrows(found, AT_RUN_TIME)) == []
    assert circles(arrows(found, EVERY)) == [["house.a", "house.b", "house.c"]]


def test_packages_can_be_in_a_circle_whose_modules_are_not(tmp_path: Path) -> None:
    found = tree(
        tmp_path, one__a="from house.two import b\n", two__b="", two__c="import house.one.d\n", one__d=""
    )
    assert circles(arrows(found, {LOADED})) == []
    assert circles(arrows(found, {LOADED}, depth=2)) == [["house.one", "house.two"]]


def test_every_circle_is_found_once() -> None:
    pairs = {
        ("a", "b"),
        ("b", "c"),
        ("c", "a"),
        ("c", "d"),
        ("d", "e"),
        ("e", "d"),
        ("e", "f"),
        ("x", "a"),
        ("f", "f"),
    }
    assert circles(pairs) == [["a", "b", "c"], ["d", "e"]]


def test_the_report_counts_a_small_tree(tmp_path: Path) -> None:
    tree(tmp_path, a="# why\nThing(1, 2, 3, 4, 5, 6)  # noqa: X\nThing(a=1)\n\n\ndef f():\n    pass\n")
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n\nOne two three. Four five six\nseven!\n\n```\nno words\n```\n")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "short.md").write_text("One two.\n")
    (docs / "long.md").write_text("One two three four. Five six seven eight.\n")
    (docs / "commands.md").write_text("This page is made, and all of its words are left out of the count.\n")
    shown = dict(
        re.split(r"\s{2,}", line, maxsplit=1)
        for line in figures.report(tmp_path / "house", readme, docs)
        if line[0] != " "
    )
    assert shown["positional calls of 6 or more"] == "500.0 per 1,000 of 2 calls of a class"
    assert shown["comments per 100 lines"] == "14.3"
    assert shown["function length p90 / p99"] == "2 / 2"
    assert shown["README words / mean sentence"] == "13 / 4"
    assert shown["docs words / mean sentence"] == "10 / 3.3, at most 4.0 (long.md)"


def test_several_trees_are_columns_of_one_table(tmp_path: Path) -> None:
    tree(
        tmp_path / "new", a="import os\n", b="from . import a\nfrom .a import os\nfrom house import c\n", c=""
    )
    tree(tmp_path / "old", a="def f():\n    pass\n", tests__test_a="x = 1\n" * 9, a_test="x = 1\n")
    (tmp_path / "new" / "pyproject.toml").touch()
    (tmp_path / "new" / "README.md").write_text("One two three.\n")
    packages = [tmp_path / "new" / "house", tmp_path / "old" / "house"]
    assert {(one.importer, one.imported) for one in imports_of(modules_of(packages[0]))} == {
        ("house.b", "house.a"),
        ("house.b", "house.c"),
    }
    shown = list(figures.table(packages))
    assert shown[0] == f"house 2: {packages[1]}"
    rows = {line[: figures.LABEL].strip(): line[figures.LABEL :].split() for line in shown[2:]}
    assert shown[1].split() == ["house", "house", "2"]
    assert rows["code lines"] == ["4", "2"]
    assert rows["modules"] == ["4", "3"]  # with those of the packages themselves; tests are left out
    assert rows["README words"] == ["3", "-"]
    many = list(figures.table(packages * 5))
    assert max(map(len, (line for line in many if not line.startswith("house")))) <= figures.WIDTH
    assert sum(line.startswith("code lines") for line in many) == 2


def test_this_project_imports_by_full_names() -> None:
    """A name that is looked for is found wherever it stands."""
    dotted = [
        f"{module.name}:{node.lineno}"
        for module in modules_of(ROOT / "src" / "holdfast")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert dotted == []


ROOT = Path(__file__).parents[2]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *figures.pages(ROOT / "docs")]


def test_sentences_of_the_documents_are_short() -> None:
    """The mean over all pages at most 18 words, no page above 22, and no sentence that nobody can hold in mind."""
    assert figures.mean([n for page in WRITTEN for n in figures.sentences(page)]) <= 18
    assert {
        p.name: figures.mean(figures.sentences(p)) for p in WRITTEN if figures.mean(figures.sentences(p)) > 22
    } == {}
    assert [s for page in WRITTEN for s in figures.prose(page.read_text()) if figures.words(s) > 36] == []
    assert [s for s in figures.prose(WRITTEN[0].read_text()) if figures.words(s) > 30] == []


def test_what_counts_as_code(tmp_path: Path) -> None:
    tree(
        tmp_path,
        a='"""Of a\nmodule."""\n\nimport os  # why\nfrom house import (\n    b,\n)\n\n# alone\nx = """a\nb"""\n"""Of a field."""\n',
        b="class Same:\n    class Inner: ...\n",
        c="from house import b\n\nclass Same:\n    class _Own: ...\n",
        d="from house import a\n\ndef f():\n    class Inner: ...\n",
    )
    modules = {module.name: module for module in modules_of(tmp_path / "house")}
    assert figures.code_lines(modules["house.a"]) == {4, 5, 6, 7, 10, 11}
    assert figures.import_lines(modules["house.a"]) == {4, 5, 6, 7}
    assert figures.shared_names(list(modules.values())) == {
        "Inner": ["house.b", "house.d"],
        "Same": ["house.b", "house.c"],
    }
    assert figures.single_importers(imports_of(list(modules.values()))) == 1
