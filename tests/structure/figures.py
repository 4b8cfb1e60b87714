"""The figures by which the project's sources compare with others'.

    python tests/structure/figures.py [PACKAGE] [README [DOCS]]      one tree, with the names in its circles
    python tests/structure/figures.py PACKAGE PACKAGE ...            several as columns of a table

Any tree can be measured, so the same numbers are had for an older commit and for another project. The tests that some projects
keep within their package are left out.

    lines                 of all modules, blank ones and docstrings included
    code lines            those of them that are neither blank, nor comments or docstrings alone; how many are imports
    small modules         those of fewer than forty code lines, and those that one other module imports
    names of classes      public ones that stand in more than one module
    function length       lines from `def` to the end of the body, decorators left out; 90th and 99th percentile
    positional calls      calls of a class (its name begins with a capital) that pass six or more arguments by position, of
                          1,000 such calls
    comments              comments that a reader reads, of 100 lines: no noqa, no type: ignore, no ruler between methods;
                          a comment of three lines counts three times
    circles               modules that reach themselves along imports: on load, at run time (imports inside functions too),
                          and with those that only a type checker reads
    walks                 files and forms of five things on their way through these sources, see `walks`: of this tree alone
    README                all its words as `wc -w` counts them, and how many a sentence of its prose has on average: code
                          blocks, tables, headings and the addresses of links are no prose
    docs                  the same of all pages of a folder together, and the page whose sentences are longest on average
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import walks
from imports import AT_RUN_TIME, EVERY, LOADED, Import, Module, arrows, circles, imports_of, modules_of

MANY_ARGUMENTS = 6
SMALL = 40
WIDTH = 100
"""Characters of a line of the table."""
LABEL = 33
"""Of these, for what a line shows."""
_PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|ruff:|mypy:|pragma|!|-{4,})")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[(])|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+")


def comments(module: Module) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(module.path.read_text()).readline)
    return sum(t.type == tokenize.COMMENT and not _PRAGMA.match(t.string) for t in tokens)


def code_lines(module: Module) -> set[int]:
    """The numbers of the lines that have code."""
    source = module.path.read_text()
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        # Also below a field: a string that is a statement by itself says something to people.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None
            found.difference_update(range(node.lineno, node.end_lineno + 1))
    return found


def import_lines(module: Module) -> set[int]:
    """The numbers of the lines of its imports, wherever they stand."""
    imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {n for node in imports for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def shared_names(modules: list[Module]) -> dict[str, list[str]]:
    """Names of public classes that stand several times, in order, and the module of each. Classes within classes count."""
    where: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(module.name)
    return {name: found for name, found in sorted(where.items()) if len(found) > 1}


def single_importers(imports: list[Import]) -> int:
    """How many modules one other module alone imports."""
    importers: dict[str, set[str]] = {}
    for one in imports:
        importers.setdefault(one.imported, set()).add(one.importer)
    return sum(len(found) == 1 for found in importers.values())


def function_lengths(module: Module) -> Iterator[int]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def constructor_calls(module: Module) -> Iterator[int]:
    """The number of arguments by position of every call of a class."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if re.fullmatch(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
                yield len(node.args)


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0


def prose(markdown: str) -> list[str]:
    """The sentences of a page."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.S | re.M)
    text = re.sub(r"^\s*\|.*$|^#+ .*$|<!--.*?-->|<[^>]+>", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [s for s in _SENTENCE_END.split(text) if re.search(r"\w", s)]


def words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def sentences(page: Path) -> list[int]:
    """How many words each sentence of a page's prose has."""
    return [words(sentence) for sentence in prose(page.read_text())]


def pages(docs: Path) -> list[Path]:
    """What people wrote: the page of commands is made from `--help`, and its words are counted nowhere."""
    return [page for page in sorted(docs.rglob("*.md")) if page.name != "commands.md"]


def mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


def is_test(module: Module) -> bool:
    *folders, name = module.name.split(".")
    return name.startswith("test_") or name.endswith("_test") or not {"test", "tests"}.isdisjoint(folders)


@dataclass(frozen=True)
class Prose:
    """Of a README, or of the pages of a folder together."""

    words: int
    mean: float
    """Words of a sentence."""
    longest: float
    """The same of the page where it is largest."""
    page: str
    """That page's name."""


def prose_of(written: list[Path]) -> Prose | None:
    """None: there is none."""
    if not written:
        return None
    longest = max(written, key=lambda page: mean(sentences(page)))
    return Prose(
        sum(len(page.read_text().split()) for page in written),
        mean([n for page in written for n in sentences(page)]),
        mean(sentences(longest)),
        longest.name,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one tree."""

    lines: int
    modules: int
    code: int
    import_share: float
    """Code lines that are imports, of 100."""
    small: int
    single_importers: int
    shared_names: int
    lengths: tuple[int, int]
    many_arguments: float
    """Of 1,000 calls of a class."""
    calls: int
    comments: float
    """Of 100 lines."""
    logging: int
    circles: tuple[tuple[str, list[list[str]], list[list[str]]], ...]
    """By what runs the imports: groups of modules, and of packages."""
    walks: tuple[walks.Walk, ...]
    """Those that lead through these sources."""
    readme: Prose | None
    docs: Prose | None


def measured(package: Path, readme: Path, docs: Path) -> Figures:
    modules = [module for module in modules_of(package) if not is_test(module)]
    lines = sum(module.path.read_text().count("\n") for module in modules)
    lengths = [n for module in modules for n in function_lengths(module)]
    calls = [n for module in modules for n in constructor_calls(module)]
    by_module = [len(code_lines(module)) for module in modules]
    imports = imports_of(modules)
    code, imported = sum(by_module), sum(len(import_lines(module)) for module in modules)
    by_path = walks.by_path(modules)
    return Figures(
        lines=lines,
        modules=len(modules),
        code=code,
        import_share=100 * imported / max(1, code),
        small=sum(n < SMALL for n in by_module),
        single_importers=single_importers(imports),
        shared_names=len(shared_names(modules)),
        lengths=(percentile(lengths, 0.9), percentile(lengths, 0.99)),
        many_arguments=1000 * sum(n >= MANY_ARGUMENTS for n in calls) / max(1, len(calls)),
        calls=len(calls),
        comments=100 * sum(map(comments, modules)) / max(1, lines),
        logging=sum("import logging" in module.path.read_text() for module in modules),
        circles=tuple(
            (label, circles(arrows(imports, kinds)), circles(arrows(imports, kinds, 2)))
            for label, kinds in (("on load", {LOADED}), ("at run time", AT_RUN_TIME), ("with types", EVERY))
        ),
        walks=tuple(walk for walk in walks.WALKS if not any(walks.faults(walk, by_path))),
        readme=prose_of([readme] if readme.is_file() else []),
        docs=prose_of(pages(docs)),
    )


def report(package: Path, readme: Path, docs: Path) -> Iterator[str]:
    """A line for each figure of one tree."""
    found = measured(package, readme, docs)
    yield f"{'lines':<34}{found.lines:,} in {found.modules} modules"
    yield f"{'code lines':<34}{found.code:,}, of which {found.import_share:.1f}% are imports"
    yield f"{'small modules':<34}{found.small} below {SMALL} code lines, {found.single_importers} with one importer"
    yield f"{'names of classes':<34}{found.shared_names} in several modules"
    yield f"{'function length p90 / p99':<34}{found.lengths[0]} / {found.lengths[1]}"
    share = f"{found.many_arguments:.1f} per 1,000 of {found.calls:,} calls of a class"
    yield f"{'positional calls of 6 or more':<34}{share}"
    yield f"{'comments per 100 lines':<34}{found.comments:.1f}"
    yield f"{'modules that import logging':<34}{found.logging}"
    prefix = f"{package.name}."
    for label, modules, packages in found.circles:
        yield f"{f'circles {label}':<34}{sum(map(len, modules))} modules, {sum(map(len, packages))} packages"
        for kind, groups in (("packages", packages), ("modules", modules)):
            for group in groups:
                yield f"    {kind}: {' '.join(name.removeprefix(prefix) for name in group)}"
    for walk in found.walks:
        counts = f"{len(walks.files(walk))} files, {len(walks.forms(walk))} forms"
        yield f"{f'walk of {walk.title}':<34}{counts}"
    if found.readme is not None:
        yield f"{'README words / mean sentence':<34}{found.readme.words:,} / {found.readme.mean:.0f}"
    if found.docs is not None:
        yield (
            f"{'docs words / mean sentence':<34}{found.docs.words:,} / {found.docs.mean:.1f}, "
            f"at most {found.docs.longest:.1f} ({found.docs.page})"
        )


def cells(found: Figures) -> Iterator[tuple[str, str]]:
    """The same figures, each short enough for a column."""
    yield "lines", f"{found.lines:,}"
    yield "modules", f"{found.modules}"
    yield "code lines", f"{found.code:,}"
    yield "  of these, imports", f"{found.import_share:.1f}%"
    yield f"modules below {SMALL} code lines", f"{found.small}"
    yield "modules with one importer", f"{found.single_importers}"
    yield "names of classes in several", f"{found.shared_names}"
    yield "function length p90 / p99", f"{found.lengths[0]} / {found.lengths[1]}"
    yield "calls by 6 positions, per 1,000", f"{found.many_arguments:.1f}"
    yield "comments per 100 lines", f"{found.comments:.1f}"
    yield "modules that import logging", f"{found.logging}"
    for label, modules, packages in found.circles:
        yield f"circles {label}", f"{sum(map(len, modules))} / {sum(map(len, packages))}"
    yield "files / forms on walks", ""
    for walk in walks.WALKS:
        counts = f"{len(walks.files(walk))} / {len(walks.forms(walk))}" if walk in found.walks else "-"
        yield f"  {walk.title}", counts
    for label, prose in (("README", found.readme), ("docs", found.docs)):
        yield f"{label} words", "-" if prose is None else f"{prose.words:,}"
        yield "  of a sentence", "-" if prose is None else f"{prose.mean:.0f}"


def table(packages: Sequence[Path]) -> Iterator[str]:
    """Several trees side by side; those for which a line has no room come below the others."""
    names = [package.name for package in packages]
    columns: list[list[str]] = []
    labels: list[str] = []
    for number, package in enumerate(packages):
        # In a source tree the project's pages stand beside the package, or beside the `src` that it is in.
        project = next((p for p in package.parents[:2] if (p / "pyproject.toml").exists()), package)
        rows = list(cells(measured(package, project / "README.md", project / "docs")))
        labels = ["", *(label for label, _ in rows)]
        again = names[:number].count(package.name)
        columns.append(
            [f"{package.name} {again + 1}" if again else package.name, *(cell for _, cell in rows)]
        )
        if again:
            yield f"{columns[-1][0]}: {package}"
    widths = [max(map(len, column)) + 2 for column in columns]
    first = 0
    while first < len(columns):
        last = first + 1
        while last < len(columns) and LABEL + sum(widths[first : last + 1]) <= WIDTH:
            last += 1
        for row, label in enumerate(labels):
            line = "".join(f"{columns[n][row]:>{widths[n]}}" for n in range(first, last))
            yield f"{label:<{LABEL}}{line}".rstrip()
        first = last


def main() -> None:
    given = [Path(argument) for argument in sys.argv[1:]] or [Path("src/holdfast")]
    if any((other / "__init__.py").exists() for other in given[1:]):
        lines = table([package.resolve() for package in given])
    else:
        readme = given[1] if len(given) > 1 else Path("README.md")
        lines = report(given[0].resolve(), readme, given[2] if len(given) > 2 else readme.parent / "docs")
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
