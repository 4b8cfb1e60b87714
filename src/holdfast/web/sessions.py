"""Who may open the page: a code that is good once becomes a cookie, and a cookie has a role.

A browser cannot prove that it knows the job's token as the job's own processes do, and must not hold it. So whoever knows
the token asks for a code, and the browser that brings it gets a cookie. The cookie is a signed text: no table of sessions,
so it is good with the coordinator that follows, and ends with the key. Pure but for the clock that is given.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from holdfast.protocol.network.proof import is_same

CODE_S = 60.0
CODES_KEPT = 64
"""Codes that nobody has used yet; of more the oldest ends."""
COOKIE_S = 7 * 24 * 3600.0
COOKIE_CHARS = 200
"""A longer one is refused unread."""
QUERY_CHARS = 2000
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""At any port: a browser reaches the page through a forwarded one. Somebody else's page that has itself resolved to this
machine still sends its own name."""
PREFIXES = ("/static/", "/api/v1/")
CODE_PATH = "/page-code"
"""Where a process that knows the job's token asks the coordinator for a code, `?role=`."""
ENTER = "/enter"
MARK = "X-Holdfast"
"""A header of every request that changes something: a form on somebody else's page cannot send it."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9/_.~%@+-]*")


class Role(StrEnum):
    """What a session may do."""

    VIEW = "view"
    ACT = "act"


@dataclass(frozen=True)
class Proxy:
    """Where a proxy serves the page, as JupyterHub's does: `https://hub.example/user/ada/proxy/8765/`."""

    scheme: str
    host: str
    """With its port, where it is not the scheme's own."""
    path: str
    """It ends with a slash."""

    @classmethod
    def of(cls, url: str) -> Proxy:
        """Raises ValueError."""
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise ValueError(
                f"{url!r} is no address of a page, like https://hub.example/user/ada/proxy/8765/"
            )
        # The path goes into a header of its own: nothing that could end it there.
        if not _PLAIN_PATH.fullmatch(parts.path):
            raise ValueError(f"the path of {url!r} has characters that no proxy's should have")
        return cls(parts.scheme, parts.netloc.lower(), parts.path.rstrip("/") + "/")

    @property
    def origin(self) -> str:
        """As a browser names it."""
        return f"{self.scheme}://{self.host}"

    @property
    def url(self) -> str:
        """The page's address."""
        return f"{self.origin}{self.path}"


class Sessions:
    """Codes and cookies of one address.

    Codes are asked for from one thread and looked at from another, each by one call on a dict.
    """

    def __init__(
        self,
        key: str,
        port: int,
        now: Callable[[], float],
        hosts: frozenset[str] = frozenset(),
        proxy: Proxy | None = None,
    ) -> None:
        """key: a secret; cookies end with it. now: seconds since 1970. hosts: by which browsers reach it, beside LOCAL_NAMES.

        proxy: what browsers reach it through.
        """
        self._key, self._now = key.encode(), now
        self._hosts = LOCAL_NAMES | hosts | ({_name_of(proxy.host)} if proxy else frozenset())
        self._proxy = proxy
        # A proxy of many people's servers has one name for all of them: without its path the browser would show this
        # cookie to everybody's.
        self.cookie_path = proxy.path if proxy else "/"
        # Cookies do not know ports: two jobs on one machine would overwrite each other's.
        self.cookie = f"holdfast_{port}"
        self._codes: dict[str, tuple[Role, float]] = {}

    def new_code(self, role: Role) -> str:
        """A code of 128 bits, good once and for CODE_S."""
        code = secrets.token_hex(16)
        # Whoever may ask for codes could ask without end. The oldest goes, since it is
        # the nearest to its own end.
        while len(self._codes) >= CODES_KEPT:
            self._codes.pop(next(iter(self._codes)), None)
        # Its hash: what reads this process's memory or a log of it finds no code to use.
        self._codes[_hash(code)] = role, self._now() + CODE_S
        return code

    def is_code(self, code: str) -> bool:
        """Whether it could be used now."""
        known = self._codes.get(_hash(code))
        return known is not None and self._now() <= known[1]

    def redeem(self, code: str) -> str | None:
        """The value of a cookie for a code, which is used up; None: it is not good."""
        # Taken out in one call before it is looked at: of two browsers that bring the
        # same code, only one gets in.
        role, until_s = self._codes.pop(_hash(code), (Role.VIEW, -1.0))
        if self._now() > until_s:
            return None
        # The end is within the signed text: a browser that keeps its cookie for longer
        # is refused all the same.
        told = f"{role}.{int(self._now() + COOKIE_S)}"
        return f"{told}.{self._sign(told)}"

    def role(self, cookies: str) -> Role | None:
        """What the Cookie header of a request gives; None: nothing."""
        try:
            # A browser sends the cookies of all ports of this name, so there may be many. The bound limits
            # what a stranger's header costs.
            jar = SimpleCookie(cookies[: 20 * COOKIE_CHARS])
        except CookieError:
            return None
        value = jar[self.cookie].value if self.cookie in jar else ""
        told, _, signed = value.rpartition(".")
        # The signature comes before the content: `Role` and `int` below meet only what
        # this program has written.
        if not told or len(value) > COOKIE_CHARS or not is_same(signed, self._sign(told)):
            return None
        role, _, until_s = told.partition(".")
        return Role(role) if int(until_s) >= self._now() else None

    def judge(self, method: str, target: str, headers: Mapping[str, str]) -> tuple[int, Role | None]:
        """An HTTP status and the role of a request that shows no proof; 200: it may pass.

        headers: with names in lower case. target: path and query as they were sent.
        """
        host = headers.get("host", "")
        path = target.partition("?")[0]
        if len(target) > QUERY_CHARS:
            return 414, None
        # First of all: a page that had its own name resolved to this machine must not learn even who is in.
        if _name_of(host) not in self._hosts:
            return 421, None
        if not (path in ("/", ENTER) or path.startswith(PREFIXES)):
            return 401, None
        # Looked at and not used up: the listener's thread asks this first, and the application asks it again.
        if path == ENTER:
            codes = parse_qs(urlsplit(target).query).get("code", [""])
            return (200, None) if method == "GET" and self.is_code(codes[0]) else (403, None)
        role = self.role(headers.get("cookie", ""))
        if role is None:
            return 401, None
        # Reading changes nothing, and a page of another site cannot see the answer. So it needs
        # no more than the cookie.
        if method in ("GET", "HEAD"):
            return 200, role
        if method != "POST":
            return 405, None
        # A browser says with each POST whose page sends it. Another site's page cannot give our name there.
        # A proxy may put this server's own name into Host; what the browser says of its page stays as it is.
        origins = {f"http://{host}", f"https://{host}"} | ({self._proxy.origin} if self._proxy else set())
        same = headers.get("origin", "") in origins
        if not same or headers.get(MARK.lower()) != "1" or role is not Role.ACT:
            return 403, None
        return 200, role

    def _sign(self, told: str) -> str:
        # The cookie's name is signed, too, and has the port: the cookie of one page is no good
        # at another with the same key.
        return hmac.digest(self._key, f"holdfast page 1 {self.cookie} {told}".encode(), "sha256").hex()


def _hash(code: str) -> str:
    # A code out of a URL may have any character. One that is no code has to be unknown, and must not raise.
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


def _name_of(host: str) -> str:
    # An IPv6 address has colons of its own: only digits behind the last colon are a port.
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
