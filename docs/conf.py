"""The documentation site: `make docs` builds it into out/docs. Every warning is an error there.

Nothing is fetched while building: the theme has its own fonts and scripts, and no inventory of another project is used.
"""

from pathlib import Path

import typer
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
