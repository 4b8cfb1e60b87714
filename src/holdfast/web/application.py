"""The routes of the page, which the coordinator and `holdfast ui` both serve, and the interface through which they get
a job's data, wherever the job is. The coordinator has one source, `holdfast ui` one for each job."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Protocol

import msgspec
from aiohttp import web

from holdfast.errors import Damaged, HoldfastError
from holdfast.protocol.wire.decoding import decode
from holdfast.web.sessions import ENTER, PREFIXES, QUERY_CHARS, Role, Sessions

PANELS = (
    "now",
    "incidents",
    "incident",
    "findings",
    "timeline",
    "decisions",
    "strip",
    "ranks",
    "stall",
    "launches",
    "cost",
    "series",
    "checkpoints",
    "samples",
    "log",
    "lines",
)
"""The panels; each is `/api/v1/NAME`."""
ACTIONS = ("drain", "resize", "clear", "stop")
GZIP_BYTES = 4096
"""A shorter answer is not compressed: it would not arrive sooner."""


class PageRefused(HoldfastError):
    """The request cannot be served. status: of the HTTP answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class PageAnswer:
    """JSON, and its compressed form if compression pays."""

    body: bytes
    packed: bytes | None = None


class JobSource(Protocol):
    """One job."""

    async def panel(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        """One of PANELS. Raises PageRefused."""

    def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """Server-sent events after a number in the named ledger. The stream ends when the client should connect again."""

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> PageAnswer:
        """One of ACTIONS. dry: only says what would happen. Raises PageRefused."""


def answer(value: Any) -> PageAnswer:
    """Encodes and compresses a value. For large values, to be called from a thread."""
    body = msgspec.json.encode(value)
    # Compressed once and kept with the answer, instead of once for each viewer.
    return PageAnswer(body, gzip.compress(body, 5) if len(body) > GZIP_BYTES else None)


def whole(query: Mapping[str, str], name: str, default: int | None, most: int = 1 << 53) -> int | None:
    """A whole number, 0 or more, from a query. Raises PageRefused."""
    text = query.get(name)
    if text is None or text == "":
        return default
    # int() also takes signs, underscores and digits of other scripts, and is slow for a text without a bound.
    if len(text) > 16 or not text.isascii() or not text.isdigit() or int(text) > most:
        raise PageRefused(f"{name}: send a whole number from 0 to {most}")
    return int(text)


def frame(kind: str, data: bytes, number: int | None = None) -> bytes:
    """One server-sent event. number: its number in the ledger, from which a browser continues when it connects again."""
    # JSON of msgspec has no line breaks, which would end the event.
    known = b"" if number is None else b"id: %d\n" % number
    return b"%sevent: %s\ndata: %s\n\n" % (known, kind.encode(), data)


API = "/api/v1"
# Each open stream holds a connection and a task. Without a bound, forgotten tabs could take the
# descriptors that agents need.
STREAMS = 64
"""Number of open streams; a request beyond it is asked to come back later."""
SEND_S = 60.0
"""A viewer that does not read for this long, in seconds, is disconnected."""
# Arguments are a few short names. A larger body is refused unparsed, so no viewer
# fills this process's memory.
BODY_BYTES = 4096
_arguments = msgspec.json.Decoder(dict[str, str])
# Newer versions of aiohttp warn if a key of a request is text; older ones have nothing else.
ROLE: Any = getattr(web, "RequestKey", lambda name, kind: name)("role", str)
# Every module of the page needs its line here: the import map and the single file both find
# modules by this table alone.
IMPORTS = {
    "preact": "static/vendor/preact-11.2.0/preact.mjs",
    "htm": "static/vendor/htm-3.1.1/htm.module.js",
    "holdfast/words": "static/words.js",
    "holdfast/settings": "static/settings.js",
    "holdfast/data": "static/data.js",
    "holdfast/drawings": "static/drawings.js",
    "holdfast/curves": "static/curves.js",
    "holdfast/panels": "static/panels.js",
    "holdfast/app": "static/app.js",
    "holdfast/simulated": "static/simulated.js",
}
"""The import map: modules by the names under which they are imported, the same in the page and in a file of its own."""
UPLOT = "static/vendor/uplot-1.6.32/uPlot.iife.min.js"
STYLES = ("static/vendor/uplot-1.6.32/uPlot.min.css", "static/page.css")


class PageHost(Protocol):
    """Serves the page of one or several jobs."""

    may_act: bool
    more_jobs: int
    """Number of older jobs that `jobs` has left out."""

    async def jobs(self) -> list[dict[str, Any]]:
        """For each job that can be opened here: job, state, step, goodput, age_s. Raises PageRefused."""

    async def source(self, job: str) -> JobSource:
        """A job by its name; empty: the one that is shown first. Raises PageRefused."""


def routes(
    host: PageHost, sessions: Sessions, panels: Collection[str] = PANELS, actions: Collection[str] = ACTIONS
) -> list[web.RouteDef]:
    """The routes for `web.Application.add_routes`. Permission is checked before them, see `guard`.

    panels, actions: those that the host's sources have. With the panel `map`, the page loads the module that draws it.
    """
    page = _Page(host, sessions, panels, actions)
    return [
        web.get("/", page.index),
        web.get(ENTER, page.enter),
        web.get("/static/{path:.+}", page.static),
        web.get(f"{API}/jobs", page.jobs),
        web.get(f"{API}/session", page.session),
        web.get(f"{API}/stream", page.stream),
        web.post(f"{API}/act/{{name}}", page.act),
        web.get(f"{API}/{{name}}", page.panel),
    ]


def guard(sessions: Sessions) -> Any:
    """A middleware that admits requests that `Sessions.judge` allows, for a host on which no client proves a token."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Any:
        if (refusal := admit(sessions, request)) is not None:
            return refusal
        return await handler(request)

    return check


def admit(sessions: Sessions, request: web.Request) -> web.Response | None:
    """Stores the role of a request in it and returns None, or returns the refusal."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    # The target as it was sent, as in the listener: two ways to parse one target could admit a request that
    # the other refuses.
    status, role = sessions.judge(request.method, request.raw_path, headers)
    if status != 200:
        return web.Response(status=status, text=refusal_text(status))
    request[ROLE] = role or ""
    return None


def refusal_text(status: int) -> str:
    """The message for a person whose request is refused."""
    if status == 421:
        return "This name is not one of this page's. Open it by localhost or 127.0.0.1.\n"
    if status in (401, 403):
        return "This page needs a link that is good once and for a minute: run `holdfast ui`, and open what it prints.\n"
    return "refused\n"


async def headers_of_page(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: no content of another origin runs or is loaded, and no other site may frame the page."""
    path = request.path
    # The job's own processes use other paths, with a proof and without a browser. These headers mean nothing
    # to them.
    if path not in ("/", ENTER) and not path.startswith(PREFIXES):
        return
    response.headers["Content-Security-Policy"] = policy()
    # The address of /enter contains a code, which must not reach another site as a referrer.
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
    # Browsers do not keep a job's answers. Files are revalidated by their ETag, so a page never mixes two
    # versions of them.
    response.headers["Cache-Control"] = "no-cache" if path.startswith("/static/") else "no-store"


@cache
def policy() -> str:
    """The content security policy: one inline script is allowed, by its hash."""
    # Computed from the very text that is sent. A hash that is written down separately would differ one day,
    # and no module would load.
    digest = base64.b64encode(hashlib.sha256(import_map().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def import_map() -> str:
    """The text of the import map, with addresses relative to the page."""
    return msgspec.json.encode({"imports": {name: f"./{path}" for name, path in IMPORTS.items()}}).decode()


@cache
def file_of(path: str) -> bytes | None:
    """A file of the page below `holdfast/web`; None: there is no such file. Cached: there are only fifteen."""
    # The path comes from a URL that anybody can send: no part of it may lead out of the package.
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or len(path) > 200:
        return None
    found = resources.files("holdfast.web").joinpath(*parts)
    return found.read_bytes() if found.is_file() else None


@cache
def packed_file(path: str) -> bytes | None:
    """The same file compressed; None: there is no such file, or compression does not pay. Cached: compressed once per
    process."""
    data = file_of(path)
    return None if data is None or len(data) <= GZIP_BYTES else gzip.compress(data, 9, mtime=0)


@cache
def index_page() -> str:
    """The HTML of the page. Its parts are listed in one place, `IMPORTS` and `STYLES`."""
    text = (file_of("static/index.html") or b"").decode()
    styles = "\n".join(f'<link rel="stylesheet" href="./{path}">' for path in STYLES)
    scripts = f'<script type="importmap">{import_map()}</script>\n<script src="./{UPLOT}"></script>'
    start = '<script type="module" src="./static/start.js"></script>'
    return text.replace("<!-- styles -->", styles).replace("<!-- scripts -->", f"{scripts}\n{start}")


class _Page:
    def __init__(
        self, host: PageHost, sessions: Sessions, panels: Collection[str], actions: Collection[str]
    ) -> None:
        self._host, self._sessions = host, sessions
        self._panels, self._actions = panels, actions
        self._streams = 0

    async def index(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=index_page(), content_type="text/html")

    async def enter(self, request: web.Request) -> web.StreamResponse:
        """Exchanges a code for a cookie, once."""
        # Only here a code is used up. The listener only checks it, so a request that fails on its way in
        # keeps its code.
        value = self._sessions.redeem(request.query.get("code", ""))
        if value is None:
            return web.Response(status=403, text=refusal_text(403))
        # Relative, so that a forwarded port or a proxy's prefix stays. The browser leaves the address that
        # contains the code.
        response = web.Response(status=303, headers={"Location": "./"})
        # Scripts cannot read the cookie, and a page of another site cannot make a browser send it.
        response.set_cookie(
            self._sessions.cookie,
            value,
            httponly=True,
            samesite="Strict",
            path=self._sessions.cookie_path,
            max_age=7 * 24 * 3600,
        )
        return response

    async def static(self, request: web.Request) -> web.StreamResponse:
        path = f"static/{request.match_info['path']}"
        data = file_of(path)
        if data is None:
            return web.Response(status=404, text="there is no such file\n")
        kind = (
            "text/javascript"
            if path.endswith((".js", ".mjs"))
            else mimetypes.guess_type(path)[0] or "text/plain"
        )
        # From the content and not from a date: two coordinators may have the same file with different dates.
        packed = packed_file(path) if "gzip" in request.headers.get("Accept-Encoding", "") else None
        # A different one for each encoding: a cache in between must not give a browser an encoding that it
        # cannot read.
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}{"-gzip" if packed else ""}"'
        headers = {"ETag": etag, "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=packed or data, content_type=kind, charset="utf-8", headers=headers)

    async def jobs(self, request: web.Request) -> web.StreamResponse:
        try:
            found = await self._host.jobs()
        except PageRefused as error:
            return web.Response(status=error.status, text=f"{error}\n")
        listed = {"jobs": found, "more": self._host.more_jobs}
        return _json(request, PageAnswer(msgspec.json.encode(listed)))

    async def session(self, request: web.Request) -> web.StreamResponse:
        # This only tells the page what to show. `act` decides by itself, whatever a page assumes.
        may_act = self._host.may_act and request.get(ROLE) == Role.ACT
        abilities = {"act": may_act, "map": "map" in self._panels}
        return _json(request, PageAnswer(msgspec.json.encode(abilities)))

    async def panel(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        # `job` has selected the source. If it were left in, it would make a second key for the same panel in
        # the source's cache.
        query = {k: v for k, v in request.query.items() if k != "job"}
        try:
            if name not in self._panels:
                raise PageRefused(f"no panel {name!r}: there are {', '.join(self._panels)}", 404)
            source = await self._host.source(request.query.get("job", ""))
            return _json(request, await source.panel(name, query))
        except PageRefused as error:
            return web.Response(status=error.status, text=f"{error}\n")

    async def act(self, request: web.Request) -> web.StreamResponse:
        """`?dry=1`: what would happen. Arguments are a JSON object of texts."""
        try:
            name = request.match_info["name"]
            if name not in self._actions:
                raise PageRefused(f"no action {name!r}: there are {', '.join(self._actions)}", 404)
            # A request without a role has proven the job's token. It is not a browser's, and may do what the
            # commands may.
            if not self._host.may_act or request.get(ROLE, Role.ACT) != Role.ACT:
                raise PageRefused(
                    "this session may look and not act: open the page with `holdfast ui --act`", 403
                )
            # One byte more than is allowed distinguishes a body that is too long from one of exactly this
            # length.
            text = await request.content.read(BODY_BYTES + 1)
            if len(text) > BODY_BYTES:
                raise PageRefused(f"more than {BODY_BYTES} bytes", 413)
            arguments = decode(_arguments.decode, text or b"{}", "the body", most=BODY_BYTES)
            source = await self._host.source(request.query.get("job", ""))
            return _json(request, await source.act(name, arguments, request.query.get("dry") == "1"))
        except Damaged:
            return web.Response(status=400, text="send a JSON object of texts\n")
        except PageRefused as error:
            return web.Response(status=error.status, text=f"{error}\n")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Streams the events after `Last-Event-ID` or `?after=`, a number in the ledger `?ledger=`."""
        if self._streams >= STREAMS:
            return web.Response(status=503, text="too many viewers\n", headers={"Retry-After": "5"})
        # A browser that connects again sends the last number that it received; its address still has the
        # first one.
        last = request.headers.get("Last-Event-ID") or request.query.get("after", "0")
        try:
            after = whole({"after": last}, "after", 0) or 0
            source = await self._host.source(request.query.get("job", ""))
        except PageRefused as error:
            return web.Response(status=error.status, text=f"{error}\n")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        self._streams += 1
        try:
            await response.prepare(request)
            # Closed at once and not by the garbage collector: a generator of a viewer that left
            # would go on waiting for news.
            async with aclosing(
                source.stream(after, request.query.get("ledger", "")[:QUERY_CHARS])
            ) as frames:
                async for sent in frames:
                    # Waits while the viewer does not read: events that it has not read are in the ledger, and
                    # are not buffered in this process.
                    async with asyncio.timeout(SEND_S):
                        await response.write(sent)
        except (ConnectionError, TimeoutError):
            # A viewer that disconnects is no error. It comes back with the number of the entry that it
            # received last.
            pass
        finally:
            self._streams -= 1
        return response


def _json(request: web.Request, found: PageAnswer) -> web.Response:
    packed = found.packed is not None and "gzip" in request.headers.get("Accept-Encoding", "")
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"} if packed else {}
    return web.Response(
        body=found.packed if packed else found.body, content_type="application/json", headers=headers
    )
