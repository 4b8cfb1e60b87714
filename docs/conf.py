"""The documentation site: `make docs` builds it into out/docs. Every warning is an error there.

Nothing is fetched while building: the theme has its own fonts and scripts, and no inventory of another project is used.
"""

from pathlib import Path
from typing import Any

import typer
from numpy.typing import ArrayLike, DTypeLike
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.typing import stringify_annotation
from typer.cli import get_docs_for_click

from holdfast import __version__
from holdfast.cli.app import app

HERE = Path(__file__).parent

project = "Holdfast"
author = "The Holdfast authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = True
# Torch's and Python's own documentation cannot be linked to without the network; nor is every type of ours that a public
# signature names a page of its own.
nitpick_ignore_regex = [("py:.*", r"(?!holdfast).*"), ("py:.*", r"holdfast\.\w+\.\w+\.\w+")]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
highlight_language = "none"
default_role = "literal"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Holdfast {version}"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
html_copy_source = False


def _command_reference() -> str:
    """`holdfast COMMAND --help` of every command, as one page, by Typer's own writer."""
    command = typer.main.get_command(app)
    with command.make_context("holdfast", [], resilient_parsing=True) as context:
        return get_docs_for_click(obj=command, ctx=context, name="holdfast", title="Command reference")


# The page is made, so git ignores it. It is written only when it changed, or every build would read it anew.
_page, _text = HERE / "reference" / "commands.md", _command_reference()
if not _page.exists() or _page.read_text() != _text:
    _page.write_text(_text)


NOT_CONSTRUCTED_BY_SCRIPTS = {
    "holdfast.Run",
    "holdfast.Step",
    "holdfast.Notice",
    "holdfast.train.place.World",
    "holdfast.protocol.notices.Going",
    "holdfast.protocol.notices.NoticeCause",
    "holdfast.errors.NonFiniteGradient",
}
"""Classes whose instances a script receives and never makes: their constructors are internal, and not shown."""

_ALIASES = {
    stringify_annotation(annotation, "smart"): name
    for name, annotation in (("ArrayLike", ArrayLike), ("DTypeLike", DTypeLike))
}


def _signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Hides internal constructors, and writes numpy's aliases as a person does and not as the unions that they stand for."""
    if name in NOT_CONSTRUCTED_BY_SCRIPTS:
        return "", None
    for spelled_out, alias in _ALIASES.items():
        signature = signature and signature.replace(spelled_out, alias)
    return signature, result


def _keep_colon(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon reads what stands before a colon in the first line of a property as its type. An empty type comes first here."""
    if what in ("property", "attribute") and lines:
        lines[0] = f": {lines[0]}"


def _expect_no_type(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Types stand in annotations alone. One in a docstring is a sentence with a colon that Napoleon has cut in two."""
    for line in lines:
        if line.startswith((":type:", ":rtype:")):
            logging.getLogger(__name__).warning("%s: its docstring is read as %r", name, line)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _keep_colon, priority=400)  # Napoleon's is 500
    app.connect("autodoc-process-docstring", _expect_no_type, priority=600)
