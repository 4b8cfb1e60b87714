"""The page of a job as a single file: for a ticket, an artefact of a test run, a mail. It makes no requests and needs
no server."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import urlencode

import msgspec

from holdfast.protocol.wire.decoding import decode
from holdfast.web.application import IMPORTS, STYLES, UPLOT, JobSource, PageAnswer, PageRefused, file_of

INCIDENTS = 200
"""Number of incidents in the list, the newest; a file with all of them would grow with the job."""
STORIES = 50
FIGURES = 12
"""Number of curves of values that the script logged."""
RANKS = 500
# Whatever the texts of a job contain, nothing is fetched: a file from a mail must not contact a server.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
_PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("now", {}),
    ("incidents", {"count": str(INCIDENTS)}),
    ("findings", {"count": str(INCIDENTS)}),
    ("timeline", {}),
    ("decisions", {"count": str(INCIDENTS)}),
    ("strip", {}),
    ("ranks", {"count": str(RANKS)}),
    ("stall", {}),
    ("launches", {}),
    ("cost", {}),
    ("series", {}),
    ("checkpoints", {}),
    ("samples", {}),
    ("lines", {}),
)


async def single_file(source: JobSource) -> str:
    """HTML with all data in it. Raises PageRefused."""
    data: dict[str, Any] = {}
    for name, query in _PANELS:
        data[name] = _read(await source.panel(name, query))
    for name in data["series"]["figures"][:FIGURES]:
        data[f"series?{urlencode({'figure': name})}"] = _read(await source.panel("series", {"figure": name}))
    for incident in data["incidents"]["incidents"][:STORIES]:
        number = str(incident["id"])
        try:
            found = await source.panel("incident", {"id": number})
        except PageRefused:
            # If the report cannot be made, the file is still written without it.
            continue
        data[f"incident?id={number}"] = _read(found)
    return _page(data)


def _read(answer: PageAnswer) -> Any:
    return decode(
        msgspec.json.decode, answer.body, "what the coordinator answers cannot be read", error=PageRefused
    )


def _page(data: dict[str, Any]) -> str:
    text = _text("static/index.html")
    # "<" is written as an escape, so that no text of the job can end the script element that contains it.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    imports = msgspec.json.encode({"imports": {name: _data(path) for name, path in IMPORTS.items()}}).decode()
    styles = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<style>'
    styles += "\n".join(_text(path) for path in STYLES) + "</style>"
    scripts = (
        f'<script type="application/json" id="holdfast-data">{encoded}</script>\n'
        f'<script type="importmap">{imports}</script>\n<script src="{_data(UPLOT)}"></script>\n'
        f'<script type="module">{_text("static/start.js")}</script>'
    )
    return text.replace("<!-- styles -->", styles).replace("<!-- scripts -->", scripts)


def _text(path: str) -> str:
    return (file_of(path) or b"").decode()


def _data(path: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(file_of(path) or b"").decode()
