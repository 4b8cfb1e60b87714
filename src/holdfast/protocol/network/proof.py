"""How two processes of a job show each other that they know its token, without either showing the token.

A caller sends a nonce and a code over it; the server checks the code and answers with one of its own. Both are
HMAC-SHA256 keyed with the token. So a stranger who listens where a server of the job used to listen learns nothing
that is of use to him, and cannot give the answer by which the caller knows its own.

    caller -> server    NONCE CODE(caller, server's name, what is asked, nonce)
    server -> caller    CODE(server, server's name, what is asked, nonce)

The server's name must name one process: no other one of the job, now or later, may go by it. Then a request that a
stranger was sent in the place of a dead server is good for nobody else, and cannot be passed on to one that lives.
What this does not give is secrecy or protection from somebody who can read or change packets on the way: that is for TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SCHEME = "Holdfast"
ANSWER_HEADER = "Holdfast-Proof"
"""HTTP: the request has `Authorization: Holdfast NONCE CODE`, the response this header."""
OWN_HEADER = "X-Holdfast-Token"
"""HTTP: as good as `Authorization`, which a proxy on the way (a Kubernetes API server's) keeps for itself."""
REFUSAL = f"send the job's token: Authorization: Bearer TOKEN, or {OWN_HEADER}: TOKEN"
_CREDENTIAL_HEADERS = ("authorization", OWN_HEADER.lower())
MAX_CREDENTIAL = 256
"""Characters of a credential; a longer one is refused unread."""
ANSWER_CHARS = 2 * hashlib.sha256().digest_size
"""ASCII characters of an answer."""
_NONCE_BYTES = 16


class Question:
    """One request of a caller: made anew for every connection or HTTP request.

    Attributes:
        credential: `NONCE CODE`, ASCII; what is sent.
    """

    def __init__(self, token: str, server: str, *asked: str) -> None:
        """server: the name of the process that is called. asked: what is wanted of it, bound into both codes."""
        # From the caller. A replayed request is of no use: it names the server, the request and this nonce,
        # and the answer to it fits only the caller that made it.
        nonce = secrets.token_hex(_NONCE_BYTES)
        self.credential = f"{nonce} {_code(token, 'caller', server, asked, nonce)}"
        # Both sides are in the code by name. Otherwise the caller's own code, sent back to it, would be a
        # valid answer.
        self._expected = _code(token, "server", server, asked, nonce)

    @property
    def authorization(self) -> str:
        """The HTTP header's value."""
        return f"{SCHEME} {self.credential}"

    def proves(self, answer: str) -> bool:
        """Whether this answer can only come from the server that was called."""
        return is_same(answer, self._expected)


def answer_to(credential: str, token: str, server: str, *asked: str) -> str | None:
    """The server's answer to a caller who knows the token; None for any other."""
    # Before anything is computed over it: hashing is cheap, but a stranger could send megabytes.
    if len(credential) > MAX_CREDENTIAL:
        return None
    nonce, _, code = credential.partition(" ")
    if not is_same(code, _code(token, "caller", server, asked, nonce)):
        return None
    return _code(token, "server", server, asked, nonce)


def admit(headers: Iterable[tuple[str, str]], token: str, server: str, *asked: str) -> str | None:
    """Whether the headers of an HTTP request show that the caller knows the token. Every server asks here.

    Each of `Authorization` and `X-Holdfast-Token` may have a proof, `Holdfast NONCE CODE`. Or it has the token itself,
    `Bearer TOKEN` and `TOKEN`: for people with curl and for Prometheus, who show it at their own risk. No process of the job
    does.

    Returns the value of `ANSWER_HEADER`, empty for who showed the token; None: refused. Every credential has to be good:
    two that differ are two callers in one request, of whom a proxy on the way may have added one.
    """
    given = [(name.lower(), value) for name, value in headers if name.lower() in _CREDENTIAL_HEADERS]
    if not 1 <= len(given) <= len(_CREDENTIAL_HEADERS):
        return None
    answers = [_answer_to_header(name, value, token, server, *asked) for name, value in given]
    # Two proofs have two nonces, and the answer fits one of them.
    proofs = {x for x in answers if x}
    return None if None in answers or len(proofs) > 1 else "".join(proofs)


def _answer_to_header(name: str, value: str, token: str, server: str, *asked: str) -> str | None:
    if len(value) > MAX_CREDENTIAL + len(SCHEME) + 1:
        return None
    scheme, _, credential = value.partition(" ")
    # The scheme is public, so it may be compared as it is.
    if scheme == SCHEME:
        return answer_to(credential, token, server, *asked)
    return "" if is_same(value, f"Bearer {token}" if name == "authorization" else token) else None


def _code(token: str, side: str, server: str, asked: tuple[str, ...], nonce: str) -> str:
    # Each part with its length before it: no two lists of parts give the same bytes.
    parts = [_bytes(x) for x in ("holdfast proof 1", side, server, nonce, *asked)]
    message = b"".join(len(x).to_bytes(4, "big") + x for x in parts)
    return hmac.digest(_bytes(token), message, "sha256").hex()


def is_same(given: str | bytes, expected: str | bytes) -> bool:
    """Whether a secret is the expected one, compared in constant time. Every token, code and proof is compared here."""
    # Over bytes, because `hmac.compare_digest` raises for text that is not ASCII: a stranger could end a thread with one
    # header. In constant time, because `==` stops at the first byte that differs, so that a caller who measures could
    # find a token byte by byte.
    return hmac.compare_digest(_bytes(given), _bytes(expected))


def _bytes(text: str | bytes) -> bytes:
    # aiohttp hands over header bytes that are not UTF-8 as lone surrogates, which a plain encode() refuses.
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


FILE_NAME = "metrics-token"
PATH = "/metrics"
"""The one HTTP path that it opens, for GET."""


# ---------------------------------------------------------------- scrape token
# What a Prometheus shows to read `/metrics`, and nothing else, of every job of a home.
#
# A job's own token opens everything, and each start makes a new one. One entry of `scrape_configs` has one token for all of
# its targets, so there is one for the home that lasts.


def home_of(job_dir: Path) -> Path | None:
    """The home of a job's folder; None: it is in none, so nobody looks for its jobs there."""
    folder = job_dir.absolute()
    return folder.parents[1] if folder.parent.name == "jobs" else None


def read_scrape_token(job_dir: Path) -> str:
    """Empty: there is none, and nobody is let in by it."""
    home = home_of(job_dir)
    try:
        return "" if home is None else (home / FILE_NAME).read_text().strip()
    except OSError:
        return ""


def make_scrape_token(home: Path) -> None:
    """Makes one where there is none. Raises OSError."""
    path = home / FILE_NAME
    if path.exists():
        return
    # Whole and with its mode from the first moment, and only if nobody was faster: two jobs that start together must
    # not each keep a token of their own.
    work = home / f".{FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as out:
            out.write(secrets.token_urlsafe(32))
        # A link and no rename: a rename would replace the token of a job that was faster.
        with suppress(FileExistsError):
            os.link(work, path)
    finally:
        work.unlink(missing_ok=True)
