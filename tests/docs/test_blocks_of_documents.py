"""README and pages: every block says what it is, every link leads somewhere, every command exists (in prose too), and what
is not an excerpt runs.

A block's first word is its language. `excerpt` after it: it is a part of something and cannot run by itself; its commands
must exist all the same. `file=NAME`: it is written into that file, which the commands after it use. `text output`: lines
that the block before it printed, in this order and with other figures; `...` stands for anything. Each page has a
folder and a HOLDFAST_HOME of its own, in which its blocks run one after the other.
"""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from holdfast.cli.app import app

ROOT = Path(__file__).parents[2]
MADE = ROOT / "docs" / "reference" / "commands.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p != MADE),
]
LANGUAGES = {"sh", "python", "toml", "yaml", "text"}
FENCE = re.compile(r"^```(?P<info>.*)\n(?P<text>(?:.*\n)*?)^```$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<to>[^)\s]+)\)")
COMMANDS = ("holdfast", "make")
SHORTER = {"until=10_000": "until=60", "until=200": "until=60", "days: 30": "days: 3"}
"""What is trained for a day on a page, or simulated for a month, and what takes a moment here."""
LIMIT_S = 100


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. file: where it is written, or nothing."""

    language: str
    is_excerpt: bool
    is_output: bool
    file: str
    text: str

    @property
    def runs(self) -> bool:
        return not self.is_excerpt and (self.language != "text" or bool(self.file))


def blocks(page: Path) -> list[Block]:
    """All but the directives of the site."""
    found = []
    for match in FENCE.finditer(page.read_text()):
        words = match["info"].split()
        if words and words[0].startswith("{"):
            continue
        files = [w.removeprefix("file=") for w in words if w.startswith("file=")]
        found.append(
            Block(
                words[0] if words else "",
                "excerpt" in words,
                "output" in words,
                "".join(files),
                match["text"],
            )
        )
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


LONG = ("accelerate", "checkpoints", "convert", "scripts", "start", "transformers")
NIGHTLY = ("lightning",)
"""Pages in docs/ whose blocks run for many seconds, and for minutes where others run beside them."""


def each_page(*, that_runs: bool) -> Any:
    pages = [p for p in PAGES if not that_runs or any(b.runs for b in blocks(p))]
    marks = dict.fromkeys(LONG, pytest.mark.long) | dict.fromkeys(NIGHTLY, pytest.mark.nightly)
    return pytest.mark.parametrize(
        "page",
        [pytest.param(p, id=name_of(p), marks=marks.get(p.stem, ()) if that_runs else ()) for p in pages],
    )


@each_page(that_runs=False)
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, block.text
        if block.runs and block.language in ("toml", "yaml"):
            assert block.file, f"nothing uses it: give it file=NAME, or mark it as an excerpt\n{block.text}"


@each_page(that_runs=False)
def test_no_block_escapes(page):
    """A fence that is indented, of tildes or never closed, and code that is only indented, would be seen by no other test."""
    rest = FENCE.sub("", page.read_text())
    assert not re.search(r"^\s*(```|~~~)", rest, re.MULTILINE)
    assert not re.search(r"\n\n {4,}\S", rest)


@each_page(that_runs=False)
def test_every_link_leads_somewhere(page):
    """Sphinx looks at those of the site; these are followed where the pages are read as files."""
    for link in LINK.finditer(FENCE.sub("", page.read_text())):
        to, _, heading = link["to"].partition("#")
        if "://" in to:
            continue
        target = (page.parent / to) if to else page
        assert target.exists() or target == MADE, link[0]
        assert not heading or heading in headings(target), link[0]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and MyST derive them from its headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_extra_that_a_page_installs_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"(?:holdfast|\.)\[([\w,]+)\]['\"]", page.read_text()):
            assert set(names.split(",")) <= set(extras), f"{name_of(page)}: {names}"


def test_every_variable_is_on_its_page():
    """What the sources read from the environment, or give to workers, has a line on the page for that."""
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert (
        sorted(set(re.findall(r'"(HOLDFAST_[A-Z_]+)"', sources)) - set(re.findall(r"HOLDFAST_[A-Z_]+", page)))
        == []
    )


def test_every_promise_names_tests_that_exist():
    for page, at_least in (("promises.md", 12), ("security.md", 8)):
        named = set(re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / page).read_text()))
        assert len(named) >= at_least
        assert [n for n in sorted(named) if not (ROOT / n).exists()] == []


# ------------------------------------------------------------ commands


def commands(text: str) -> list[list[str]]:
    """The calls of `holdfast` and `make` in shell text, as words."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        found += [words for words in split(line) if words and words[0] in COMMANDS]
    return found


def split(line: str) -> list[list[str]]:
    """The calls of one line: what stands between `|`, `&&` and `;`, without what is sent into files."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    into_file = False
    for word in lexer:
        if set(word) <= set("|&;"):
            calls.append([])
        elif word == ">":
            into_file = True
        elif into_file:
            into_file = False
        elif word != "...":
            calls[-1].append(word)
    return calls


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str], complete: bool = True) -> None:
    """Raises what the command line would report of a wrong command, option or, if it is complete, number of arguments."""
    name, command, context = "holdfast", command_line(), None
    args = words[1:]
    while True:
        try:
            context = command.make_context(name, args, parent=context)
        except Exception as error:
            if complete or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                raise
            return
        rest = [*context._protected_args, *context.args] if hasattr(command, "resolve_command") else []
        if not rest:
            return
        name, command, args = command.resolve_command(context, rest)


@each_page(that_runs=False)
def test_every_command_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks(page):
        if block.language != "sh":
            continue
        for words in commands(block.text):
            if words[0] == "make":
                assert words[1] in targets, block.text
                continue
            try:
                parse(words)
            except Exception as error:
                raise AssertionError(f"{shlex.join(words)}: {error}") from error


@each_page(that_runs=False)
def test_every_command_in_prose_exists(page):
    """`holdfast resize 3` in a sentence or a table. What a reader fills in is in capitals, or in brackets."""
    prose = FENCE.sub("", page.read_text())
    for code in re.findall(r"`(holdfast [a-z][^`]*)`", prose.replace("\n", " ")):
        try:
            parse(shlex.split(re.sub(r"\[.*?\]|\.\.\.| > .*", "", code).replace(" N", " 1")), complete=False)
        except Exception as error:
            raise AssertionError(f"{code}: {error}") from error


@each_page(that_runs=False)
def test_every_benchmark_exists(page):
    text = page.read_text().replace("\\\n", " ")
    for module, options in re.findall(r"python -m (bench[\w.]*)([^`\n#)]*)", text):
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        sources = (ROOT / "bench").rglob("*.py")
        known = "".join(path.read_text() for path in sources)
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in known or option.removeprefix("--no-") in known, f"{module} {option}"


@pytest.mark.timeout(300)
@each_page(that_runs=True)
def test_what_is_not_an_excerpt_runs(page, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # One thread: on a loaded machine torch's threads would wait for each other most of the time.
    environment = os.environ | {
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "work").mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
    if page.name != "README.md":  # it uses no file that its reader does not have
        np.save(tmp_path / "work" / "corpus.npy", tokens)
    printed = ""
    for block in blocks(page):
        text = block.text
        if block.is_output:
            assert_printed(text, printed)
        if not block.runs:
            continue
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        if block.file:
            (tmp_path / "work" / block.file).write_text(text)
            continue
        command = (
            ["bash", "-euo", "pipefail", "-c", text]
            if block.language == "sh"
            else [sys.executable, "-c", text]
        )
        ran = subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        printed = ran.stdout + ran.stderr


FIGURE = re.compile(r"( *\d+(?:\.\d+)?(?: m?s\b)?|\.\.\.)")


def assert_printed(lines: str, printed: str) -> None:
    """The lines of a page, one after the other, are in what was printed."""
    at = 0
    for line in lines.splitlines():
        parts = FIGURE.split(line)  # every second one is a figure, or stands for anything
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = (".*" if x == "..." else r" *\d+(?:\.\d+)?(?: m?s\b)?" for x in parts[1::2])
        found = re.compile(f"^{''.join(parts)}$", re.MULTILINE).search(printed, at)
        assert found, f"not printed, or not at this place: {line}\n{printed}"
        at = found.end()


def test_lines_that_a_page_shows_were_printed_in_their_order():
    printed = "[holdfast]     6.43 s  incident 1: found after 33 ms (a, b)\nfinished at step 60\n"
    assert_printed(
        "[holdfast]    11.40 s  incident 2: found after 1.2 s (...)\nfinished at step 200\n", printed
    )
    others = (
        "finished at step 200\nincident 2: ...\n",
        "finished at step\n",
        "[holdfast] 1 s  incident 2: lost after 1 ms (...)\n",
    )
    for other in others:
        with pytest.raises(AssertionError, match="not printed"):
            assert_printed(other, printed)
