"""README and pages: every block says what it is, every link leads somewhere, every command exists, and what is not an
excerpt runs.

A block's first word is its language. `excerpt` after it: it is a part of something and cannot run by itself; its commands
must exist all the same. `file=NAME`: it is written into that file, which the commands after it use. Each page has a
folder and a HOLDFAST_HOME of its own, in which its blocks run one after the other.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
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
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/mathstral/README.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p != MADE),
]
LANGUAGES = {"sh", "python", "toml", "yaml", "text"}
FENCE = re.compile(r"^```(?P<info>.*)\n(?P<text>(?:.*\n)*?)^```$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<to>[^)\s]+)\)")
COMMANDS = ("holdfast", "make")
SHORTER = {"until=10_000": "until=60", "until=200": "until=60"}
"""What is trained for a day on a page, and for a moment here."""
LONG = {"docs/start.md", "docs/checkpoints.md", "docs/plan.md"}
"""Pages that start several jobs or draw many trials: those run nightly."""
LIMIT_S = 100


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. file: where it is written, or nothing."""

    language: str
    is_excerpt: bool
    file: str
    text: str

    @property
    def runs(self) -> bool:
        return not self.is_excerpt and self.language != "text"


def blocks(page: Path) -> list[Block]:
    """All but the directives of the site."""
    found = []
    for match in FENCE.finditer(page.read_text()):
        words = match["info"].split()
        if words and words[0].startswith("{"):
            continue
        files = [w.removeprefix("file=") for w in words if w.startswith("file=")]
        found.append(Block(words[0] if words else "", "excerpt" in words, "".join(files), match["text"]))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def each_page(*, that_runs: bool) -> Any:
    pages = [p for p in PAGES if not that_runs or any(b.runs for b in blocks(p))]
    marks = [pytest.mark.nightly if that_runs and name_of(p) in LONG else () for p in pages]
    return pytest.mark.parametrize(
        "page", [pytest.param(p, id=name_of(p), marks=m) for p, m in zip(pages, marks, strict=True)]
    )


@each_page(that_runs=False)
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, block.text
        if block.runs and block.language in ("toml", "yaml"):
            assert block.file, f"nothing uses it: give it file=NAME, or mark it as an excerpt\n{block.text}"


@each_page(that_runs=False)
def test_every_link_leads_somewhere(page):
    """Sphinx looks at those of the site; these are followed where the pages are read as files."""
    for link in LINK.finditer(FENCE.sub("", page.read_text())):
        to = link["to"].partition("#")[0]
        if not to or "://" in to:
            continue
        assert (page.parent / to).exists() or page.parent / to == MADE, link[0]


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "docs" / "promises.md").read_text()
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert len(named) > 15
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


def parse(words: list[str]) -> None:
    """Raises what the command line would say of a wrong command, option or number of arguments."""
    name, command, context = "holdfast", command_line(), None
    args = words[1:]
    while True:
        context = command.make_context(name, args, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, args = command.resolve_command(context, [*context._protected_args, *context.args])


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
    np.save(tmp_path / "work" / "corpus.npy", tokens)
    for block in blocks(page):
        text = block.text
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
