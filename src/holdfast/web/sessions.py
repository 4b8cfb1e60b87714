"""Permission to open the page: a code that can be used once becomes a cookie, and a cookie has a role.

A browser cannot prove that it knows the job's token as the job's own processes do, and must not hold it. So a person
who knows the token asks for a code, and the browser that presents it gets a cookie. The cookie is a signed text: there
is no table of sessions, so it stays valid with the next coordinator, and ends with the key. Pure, except for the clock
that is passed in.
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
"""Number of codes that may be unused at a time; beyond it the oldest one expires."""
COOKIE_S = 7 * 24 * 3600.0
COOKIE_CHARS = 200
"""A longer cookie is refused without being parsed."""
QUERY_CHARS = 2000
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""At any port: a browser may reach the page through a forwarded one. If somebody else's page resolves its name to this
machine, the browser still sends that page's name."""
PREFIXES = ("/static/", "/api/v1/")
CODE_PATH = "/page-code"
"""The path at which a process that knows the job's token asks the coordinator for a code, with `?role=`."""
ENTER = "/enter"
MARK = "X-Holdfast"
"""A header of every request that changes something: a form on somebody else's page cannot send it."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9/_.~%@+-]*")


class Role(StrEnum):
    """The permissions of a session."""

    VIEW = "view"
    ACT = "act"


@dataclass(frozen=True)
class Proxy:
    """The address at which a proxy serves the page, as JupyterHub's does: `https://hub.example/user/ada/proxy/8765/`."""

    scheme: str
    host: str
    """With its port, unless that is the scheme's default."""
    path: str
    """It ends with a slash."""

    @classmethod
    def of(cls, url: str) -> Proxy:
        """Parses the address. Raises ValueError."""
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
        # The path goes into a header of its own: it must not contain anything that could end the header.
        if not _PLAIN_PATH.fullmatch(parts.path):
            raise ValueError(f"the path of {url!r} has characters that no proxy's should have")
        return cls(parts.scheme, parts.netloc.lower(), parts.path.rstrip("/") + "/")

    @property
    def origin(self) -> str:
        """The origin, in the form in which a browser sends it."""
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
        """key: a secret; when it changes, all cookies end. now: seconds since 1970. hosts: names by which browsers
        reach the page, in addition to LOCAL_NAMES.

        proxy: the proxy through which browsers reach it.
        """
        self._key, self._now = key.encode(), now
        self._hosts = LOCAL_NAMES | hosts | ({_name_of(proxy.host)} if proxy else frozenset())
        self._proxy = proxy
        # A proxy for many people's servers has one name for all of them: without its path, the browser would
        # send this cookie to every one of these servers.
        self.cookie_path = proxy.path if proxy else "/"
        # Cookies do not distinguish ports: two jobs on one machine would overwrite each other's.
        self.cookie = f"holdfast_{port}"
        self._codes: dict[str, tuple[Role, float]] = {}

    def new_code(self, role: Role) -> str:
        """A code of 128 bits, good once and for CODE_S."""
        code = secrets.token_hex(16)
        # A client that may ask for codes could ask without end. The oldest one is dropped, because it would
        # expire first.
        while len(self._codes) >= CODES_KEPT:
            self._codes.pop(next(iter(self._codes)), None)
        # Stored as its hash: the memory of this process, or a log of it, does not reveal a usable code.
        self._codes[_hash(code)] = role, self._now() + CODE_S
        return code

    def is_code(self, code: str) -> bool:
        """Whether the code could be used now."""
        known = self._codes.get(_hash(code))
        return known is not None and self._now() <= known[1]

    def redeem(self, code: str) -> str | None:
        """The value of a cookie for a code, which is used up; None: the code is not valid."""
        # Removed in one call before it is checked: of two browsers that present the same code, only one gets
        # in.
        role, until_s = self._codes.pop(_hash(code), (Role.VIEW, -1.0))
        if self._now() > until_s:
            return None
        # The end is within the signed text: a browser that keeps its cookie for longer
        # is refused all the same.
        content = f"{role}.{int(self._now() + COOKIE_S)}"
        return f"{content}.{self._sign(content)}"

    def role(self, cookies: str) -> Role | None:
        """The role that the Cookie header of a request gives; None: no role."""
        try:
            # A browser sends the cookies of all ports of this name, so there may be many. The limit bounds
            # the cost of an untrusted header.
            jar = SimpleCookie(cookies[: 20 * COOKIE_CHARS])
        except CookieError:
            return None
        value = jar[self.cookie].value if self.cookie in jar else ""
        content, _, signed = value.rpartition(".")
        # The signature is checked before the content: `Role` and `int` below only get text that this program
        # has written.
        if not content or len(value) > COOKIE_CHARS or not is_same(signed, self._sign(content)):
            return None
        role, _, until_s = content.partition(".")
        return Role(role) if int(until_s) >= self._now() else None

    def judge(self, method: str, target: str, headers: Mapping[str, str]) -> tuple[int, Role | None]:
        """An HTTP status and the role of a request without a proof; 200: it is allowed.

        headers: with names in lower case. target: path and query as they were sent.
        """
        host = headers.get("host", "")
        path = target.partition("?")[0]
        if len(target) > QUERY_CHARS:
            return 414, None
        # Checked first: a page whose name was resolved to this machine must not even learn who is logged in.
        if _name_of(host) not in self._hosts:
            return 421, None
        if not (path in ("/", ENTER) or path.startswith(PREFIXES)):
            return 401, None
        # Checked and not used up: the listener's thread checks first, and the application checks again.
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
        # With each POST a browser sends the origin of the page that made it. Another site's page cannot use
        # our name there.
        origins = {f"http://{host}", f"https://{host}"} | ({self._proxy.origin} if self._proxy else set())
        same = headers.get("origin", "") in origins
        if not same or headers.get(MARK.lower()) != "1" or role is not Role.ACT:
            return 403, None
        return 200, role

    def _sign(self, content: str) -> str:
        # The cookie's name, which contains the port, is signed as well: the cookie of one page is not valid
        # for another with the same key.
        return hmac.digest(self._key, f"holdfast page 1 {self.cookie} {content}".encode(), "sha256").hex()


def _hash(code: str) -> str:
    # A code from a URL may contain any character. If it is not a code it must count as unknown, and not
    # raise.
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


def _name_of(host: str) -> str:
    # An IPv6 address has colons of its own: only digits behind the last colon are a port.
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
