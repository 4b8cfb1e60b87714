"""The figures by which the project's sources compare with others': `python tests/structure/figures.py [PACKAGE] [README [DOCS]]`.

Any tree can be measured, so the same numbers are had for an older commit and for another project:

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
    README                all its words as `wc -w` counts them, and how many a sentence of its prose has on average: code
                          blocks, tables, headings and the addresses of links are no prose
    docs                  the same of all pages of a folder together, and the page whose sentences are longest on average
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from imports import AT_RUN_TIME, EVERY, LOADED, Import, Module, arrows, circles, imports_of, modules_of

MANY_ARGUMENTS = 6
SMALL = 40
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


def shared_names(modules: list[Module]) -> list[str]:
    """Names of public classes that several modules have, in order."""
    where = [
        node.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    return sorted(name for name, count in Counter(where).items() if count > 1)


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


def show_circles(imports: list[Import], prefix: str) -> Iterator[str]:
    for label, kinds in (("on load", {LOADED}), ("at run time", AT_RUN_TIME), ("with types", EVERY)):
        modules = circles(arrows(imports, kinds))
        packages = circles(arrows(imports, kinds, 2))
        yield f"{f'circles {label}':<34}{sum(map(len, modules))} modules, {sum(map(len, packages))} packages"
        for group in packages:
            yield f"    packages: {' '.join(name.removeprefix(prefix) for name in group)}"
        for group in modules:
            yield f"    modules: {' '.join(name.removeprefix(prefix) for name in group)}"


def report(package: Path, readme: Path, docs: Path) -> Iterator[str]:
    modules = modules_of(package)
    lines = sum(module.path.read_text().count("\n") for module in modules)
    lengths = [n for module in modules for n in function_lengths(module)]
    calls = [n for module in modules for n in constructor_calls(module)]
    said = sum(map(comments, modules))
    logging = sum("import logging" in module.path.read_text() for module in modules)
    yield f"{'lines':<34}{lines:,} in {len(modules)} modules"
    by_module = [len(code_lines(module)) for module in modules]
    imports = imports_of(modules)
    code, imported = sum(by_module), sum(len(import_lines(module)) for module in modules)
    yield f"{'code lines':<34}{code:,}, of which {100 * imported / max(1, code):.1f}% are imports"
    small = sum(n < SMALL for n in by_module)
    yield f"{'small modules':<34}{small} below {SMALL} code lines, {single_importers(imports)} with one importer"
    yield f"{'names of classes':<34}{len(shared_names(modules))} in several modules"
    yield f"{'function length p90 / p99':<34}{percentile(lengths, 0.9)} / {percentile(lengths, 0.99)}"
    many = sum(n >= MANY_ARGUMENTS for n in calls)
    share = 1000 * many / max(1, len(calls))
    yield f"{'positional calls of 6 or more':<34}{share:.1f} per 1,000 of {len(calls):,} calls of a class"
    yield f"{'comments per 100 lines':<34}{100 * said / max(1, lines):.1f}"
    yield f"{'modules that import logging':<34}{logging}"
    yield from show_circles(imports, f"{package.name}.")
    if readme.exists():
        count = len(readme.read_text().split())
        yield f"{'README words / mean sentence':<34}{count:,} / {mean(sentences(readme)):.0f}"
    if written := pages(docs):
        count = sum(len(page.read_text().split()) for page in written)
        average = mean([n for page in written for n in sentences(page)])
        longest = max(written, key=lambda page: mean(sentences(page)))
        yield (
            f"{'docs words / mean sentence':<34}{count:,} / {average:.1f}, "
            f"at most {mean(sentences(longest)):.1f} ({longest.name})"
        )


def main() -> None:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else "src/holdfast").resolve()
    readme = Path(sys.argv[2] if len(sys.argv) > 2 else "README.md")
    docs = Path(sys.argv[3] if len(sys.argv) > 3 else readme.parent / "docs")
    for line in report(package, readme, docs):
        print(line)


if __name__ == "__main__":
    main()
