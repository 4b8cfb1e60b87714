"""The object tier: a bucket of S3 or of what speaks like it, of Google, or of Azure, and `memory://` for tests.

An object appears when all of it is there: a store keeps the parts of an upload apart until it is completed. So
nothing is written beside a name and renamed, and no condition is put on a write (stores differ in what they honour);
checkpoints name their files by content, and their manifest is one small object that is put in one request.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, ObjectStore, from_url

from holdfast.errors import StateError, TierError, UsageError

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "memory")

PATIENCE_S = 45.0
"""A request that has had no success in this time, with all its retries, fails; an upload is then given as long again to
be aborted. So a store that stalls costs a minute, at most one and a half: short enough that a save which cannot end
does not hold up the next one."""
PART_BYTES = 8 << 20
"""One part of an upload, and one read. S3 takes no part below 5 MiB. A request has PATIENCE_S / 3: PARTS_IN_FLIGHT of
8 MiB pass in it where a rank is left with no more than 5 MB/s."""
PARTS_IN_FLIGHT = 8
"""Parts of one file under way at once; memory in flight is two more, times PART_BYTES: one is being filled, and one
waits."""
MAX_PARTS = 9_000
"""S3 takes 10,000 parts; parts of larger files grow."""

CREDENTIALS = {
    "s3": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if they are temporary), or assign a "
        "role to the machine; profiles are not read, but `aws configure export-credentials --format env` prints "
        "their variables"
    ),
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the key file of a service account, or assign one to the machine",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or assign an identity to the machine",
}
AGAIN = "Saving is tried again with the next checkpoint; save less often if this continues"
FAMILIES = {"s3a": "s3", "azure": "az", "adl": "az", "abfs": "az", "abfss": "az"}

NO_BUCKET = r"NoSuchBucket|ContainerNotFound|bucket does not exist"
# What an error's text holds, and what to do about it; the first that fits. Stores say the cause in codes of their own
# and the library hands them on as text only.
ADVICE = (
    (
        r"169\.254\.|metadata\.google|token request|MissingToken|[Mm]issing credential",
        "no credentials were found: {credentials}",
    ),
    (NO_BUCKET, "the bucket does not exist: create it, or correct the URL"),
    (r"RequestTimeTooSkewed", "this machine's clock differs from the store's: set it (NTP)"),
    (r"Expired|TokenRefreshRequired", "the credentials have expired: renew them ({credentials})"),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthenticationFailed|InvalidAuthenticationInfo|code: 401",
        "the credentials are not accepted: {credentials}",
    ),
    (
        r"code: 403|AccessDenied|AuthorizationFailure",
        "access is denied: these credentials need permission to list, read, write and delete below this URL",
    ),
    (
        r"BareRedirect|PermanentRedirect|AuthorizationHeaderMalformed",
        "the bucket is in another region: set AWS_REGION to it",
    ),
    (
        r"BadScheme|builder error|RelativeUrl",
        "the endpoint is not a URL: set AWS_ENDPOINT_URL to https://host:port",
    ),
    (
        r"code: 507|QuotaExceeded|StorageFull|InsufficientStorage",
        "the store is full: free some space, keep fewer checkpoints, or choose another store",
    ),
    (
        r"kind: Timeout|TimedOut",
        "no answer in time: is the store up, and the network fast enough? {again}",
    ),
    (
        r"BrokenPipe|ConnectionReset|IncompleteBody|IncompleteMessage|kind: Interrupted|kind: Decode",
        "the connection broke repeatedly: check the network and any proxy between this machine and the store",
    ),
    (
        r"kind: Connect|dns error|error sending request",
        "no connection: is the endpoint right (AWS_ENDPOINT_URL), the store up, and is there a network?",
    ),
    (
        r"SlowDown|InternalError|ServiceUnavailable|code: 429|code: 5",
        "the store is overloaded or down. {again}",
    ),
    (r"code: 404", "the bucket does not exist: create it, or correct the URL"),
)

_memory_stores: dict[str, ObjectStore] = {}  # the bytes behind a memory:// URL live as long as the process


class ObjectTier:
    """Files as objects below a URL: `s3://bucket/folder`, `gs://`, `az://`, `abfs://`, or `memory://name`.

    Credentials, region and endpoint come from the environment, as each vendor names them (for a store that speaks
    like S3: AWS_ENDPOINT_URL). An upload that fails is aborted. One whose process dies leaves its parts, unseen but
    paid for: give the bucket a rule that aborts incomplete uploads after a day.
    """

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = PATIENCE_S,
        part_bytes: int = PART_BYTES,
        parts_in_flight: int = PARTS_IN_FLIGHT,
        **options: Any,
    ) -> None:
        """Nothing is asked of the store yet: see `check`.

        Args:
            patience_s: a request fails when it has had no success for so long, with all its retries.
            part_bytes: size of an upload's parts and of one read; S3 wants 5 MiB at least.
            parts_in_flight: how many at once, for each file that is written or read.
            options: what `obstore.store.from_url` takes, such as `endpoint`, `region` or `client_options`; they go
                before the environment.

        Raises:
            UsageError: the URL or an option is none.
        """
        scheme = _checked(url)
        self.url = url.rstrip("/") if "://" in url.rstrip("/") else url
        self._credentials = CREDENTIALS.get(FAMILIES.get(scheme, scheme), "")
        self._part_bytes = part_bytes
        self._in_flight = parts_in_flight
        self._store = open_store(self.url, scheme, patience_s, options)

    def check(self) -> None:
        """Lists, writes, reads and removes a small object.

        Raises:
            TierError: one of them failed: no bucket, no or wrong credentials, no connection, and what to do.
        """
        name, data = f".check-{uuid.uuid4().hex}", uuid.uuid4().bytes
        self.folders()
        self.publish(name, data)
        try:
            same = self.read(name) == data
        except StateError:
            same = False
        finally:
            self.remove(name)
        if not same:
            raise TierError(
                f"the object tier {self.url} does not return data that was just written: there is a cache or proxy "
                "in between, or the store does not have read-after-write consistency; choose another one"
            )

    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        with self._explained("listed"):
            return sorted(obstore.list_with_delimiter(self._store)["common_prefixes"])

    def size(self, name: str) -> int | None:
        """Bytes of an object; None when it is not there."""
        with self._explained(f"asked for the size of {name}"):
            meta = self._meta(name)
            return None if meta is None else meta[0]

    def read(self, name: str) -> bytes:
        """A small object, whole.

        Raises:
            StateError: it is not there.
            TierError: it cannot be read.
        """
        with self._explained(f"read ({name})"), self._there(name):
            return bytes(obstore.get(self._store, name).bytes())

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fills `view` from byte `offset` on; a large one by several requests at once.

        Raises:
            StateError: the object is not there, or ends before.
            TierError: it cannot be read.
        """
        view = view.cast("B")
        lows = range(0, len(view), self._part_bytes)
        if not lows and self.size(name) is None:
            raise StateError(f"{self.url}/{name} does not exist")
        if len(lows) <= 1:
            for low in lows:
                self._read_part(name, offset + low, view)
            return
        with ThreadPoolExecutor(min(self._in_flight, len(lows))) as pool:
            # Several ranges at once, because one stream from an object store reaches a fraction of the
            # network. Each writes to its own slice of the view.
            parts = [
                pool.submit(self._read_part, name, offset + low, view[low : low + self._part_bytes])
                for low in lows
            ]
            try:
                for part in parts:
                    part.result()
            except BaseException:
                # The buffer is the caller's. It is not handed back with an error while requests that are
                # still under way write into it.
                pool.shutdown(cancel_futures=True)
                raise

    def write(
        self,
        name: str,
        buffers: Iterable[memoryview],
        nbytes: int,
        seen: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Sent in parts, several at once; each is retried by itself. The object appears when all have arrived.

        Raises:
            StateError: the buffers are not `nbytes` together; nothing appears.
            TierError: the store cannot take it; nothing appears.
        """
        part_bytes = max(self._part_bytes, -(-nbytes // MAX_PARTS))
        parts = _parts(name, buffers, nbytes, part_bytes, seen)
        if nbytes <= part_bytes:
            self.publish(name, b"".join(parts))
            return
        with self._explained(f"written ({name})"):
            # The only way to tell below whether an object of this name is ours: an older one may have had it
            # before.
            before = self._meta(name)
            try:
                obstore.put(
                    self._store,
                    name,
                    parts,
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=self._in_flight,
                )
            except FileNotFoundError:
                # The answer to the completion was lost; asked again, some stores do not know the upload any more.
                # The object is accepted only if it is new and has the right size. Its content is covered by
                # the checksums in the head, as always.
                now = self._meta(name)
                if now is None or now == before or now[0] != nbytes:
                    raise

    def publish(self, name: str, data: bytes) -> None:
        """One request, never in parts: the object is there complete, or as it was before.

        Raises:
            TierError: the store cannot take it.
        """
        with self._explained(f"written ({name})"):
            # A copy: `memory://` keeps the very buffer that it is given.
            obstore.put(self._store, name, bytes(data), use_multipart=False)

    def remove(self, name: str) -> None:
        """Removes an object; one that is not there is removed already."""
        with self._explained(f"cleared ({name})"):
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError as error:
                if _is_bucket(str(error)):
                    raise

    def files(self, folder: str) -> dict[str, int]:
        """The objects below a name, and the bytes of each."""
        with self._explained(f"listed ({folder})"):
            return {
                meta["path"]: meta["size"] for found in obstore.list(self._store, folder) for meta in found
            }

    def remove_folder(self, name: str, last: str = "") -> None:
        """Removes all objects below a name, up to a thousand with each request; `last` when the others are gone."""
        paths = self.files(name)
        # The mark that says "this is being removed" goes last. A removal that is interrupted then still
        # carries it, and is taken up again; without it the rest would look like a checkpoint that is being
        # written.
        for part in ([p for p in paths if p != last], [p for p in paths if p == last]):
            if part:
                with self._explained(f"cleared ({name})"):
                    obstore.delete(self._store, part)

    def _meta(self, name: str) -> tuple[int, str | None, object] | None:
        """Size and what changes when an object is replaced; None when it is not there."""
        try:
            meta = obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        return meta["size"], meta["e_tag"], meta["last_modified"]

    def _read_part(self, name: str, offset: int, view: memoryview) -> None:
        with self._explained(f"read ({name})"), self._there(name):
            try:
                got = memoryview(obstore.get_range(self._store, name, start=offset, length=len(view)))
            except BaseError as error:
                if re.search(r"code: 416|InvalidRange|StartTooLarge", str(error)):
                    raise StateError(
                        f"{self.url}/{name} is cut short: it ends before byte {offset}"
                    ) from error
                raise
        # Some stores answer a range that reaches past the end with what there is, and success.
        if len(got) != len(view):
            raise StateError(f"{self.url}/{name} is cut short: it ends at byte {offset + len(got)}")
        view[:] = got

    @contextmanager
    def _there(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if _is_bucket(str(error)):
                raise
            raise StateError(f"{self.url}/{name} does not exist") from error

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turns the library's errors into one that says what to do."""
        try:
            yield
        except (BaseError, OSError) as error:
            advice = advice_for(str(error)).format(credentials=self._credentials, again=AGAIN)
            raise TierError(
                f"the object tier {self.url} could not be {what}: {advice} [{short(str(error))}]"
            ) from error


def _checked(url: str) -> str:
    """The scheme of a URL that names a folder of a store."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(
            f"{url}: not a URL of an object store ({error}); use for example s3://bucket/folder"
        ) from error
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without what may be a secret
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"{shown}: {parts.scheme!r} is not a known object store; use one of {', '.join(SCHEMES)}"
        )
    if parts.scheme != "memory" and not parts.netloc:
        raise UsageError(
            f"{shown}: the name of the bucket is missing; use for example {parts.scheme}://bucket/folder"
        )
    if parts.query or parts.fragment or ("@" in parts.netloc and not parts.scheme.startswith("abfs")):
        raise UsageError(
            f"{shown}: a URL with ?, # or @ is refused because it could contain credentials; put credentials into "
            "the environment"
        )
    if ".." in parts.path.split("/") or "//" in parts.path:
        raise UsageError(f"{shown}: the path of an object store must not contain empty names or ..")
    return parts.scheme


def open_store(url: str, scheme: str, patience_s: float, options: dict[str, Any]) -> ObjectStore:
    """The library's store; see `ObjectTier` for patience and options. Raises UsageError."""
    if scheme == "memory":
        if options:
            raise UsageError(f"{url}: memory does not take options, but {', '.join(options)} was given")
        return _memory_stores.setdefault(url, MemoryStore())
    # A request that stalls is given a third of the time, and retries begin in the first half of it: with the longest
    # pause before the last one that is 1/2 + 1/6 + 1/3.
    client = {
        "timeout": timedelta(seconds=patience_s / 3),
        "connect_timeout": timedelta(seconds=min(5, patience_s / 6)),
    }
    # A pause is drawn between the first one and 3 times the last one: half as long again on average.
    backoff = {
        "init_backoff": timedelta(seconds=min(0.1, patience_s / 60)),
        "max_backoff": timedelta(seconds=patience_s / 6),
        "base": 3,
    }
    retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=patience_s / 2), "backoff": backoff}
    if _endpoint(options).startswith("http://"):
        # Plain HTTP is used by stores inside a cluster and by tests. Whoever writes http:// into the endpoint
        # has decided that; a missing scheme never means it.
        client["allow_http"] = True  # type: ignore[assignment]
    given = {
        **options,
        "client_options": {**client, **options.get("client_options", {})},
        "retry_config": {**retry, **options.get("retry_config", {})},
    }
    try:
        return from_url(url, **given)
    except (BaseError, ValueError, TypeError) as error:
        why = short(str(error))
        if "Account must be specified" in why:
            why = (
                "the account is not specified: set AZURE_STORAGE_ACCOUNT_NAME, or use "
                "abfss://container@account.dfs.core.windows.net"
            )
        raise UsageError(f"{url}: {why}") from error


def _endpoint(options: dict[str, Any]) -> str:
    """Who writes http:// there means it; the library wants to be told a second time."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    given = [options.get(k) for k in ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")]
    return next((str(e) for e in [*given, *map(os.environ.get, names)] if e), "")


def _parts(
    name: str, buffers: Iterable[memoryview], nbytes: int, part_bytes: int, seen: Callable[[int], None]
) -> Iterator[bytearray]:
    """Copies buffers of any size into parts of one size, each in memory of its own.

    Copies, because the library sends from the buffer that it is given when the iterator has long gone on, and the
    buffers' owner may reuse it. The last part is not handed out before the number of bytes is known to be right.

    Raises:
        StateError: the buffers are not `nbytes` together.
    """
    done, part, filled = 0, bytearray(min(part_bytes, nbytes)), 0
    for buffer in buffers:
        data, at = buffer.cast("B"), 0
        if done + len(data) > nbytes:
            raise StateError(f"{name}: received more than {nbytes} bytes")
        while at < len(data):
            if filled == len(part):
                yield part
                seen(filled)
                part, filled = bytearray(min(part_bytes, nbytes - done)), 0
            step = min(len(part) - filled, len(data) - at)
            part[filled : filled + step] = data[at : at + step]
            at, filled, done = at + step, filled + step, done + step
    if done != nbytes:
        raise StateError(f"{name}: received {done} bytes instead of {nbytes}")
    yield part
    seen(filled)


def advice_for(text: str) -> str:
    """What to do about an error of the library's; `{credentials}` and `{again}` (will it be tried again?) are left to
    be filled in."""
    return next((advice for pattern, advice in ADVICE if re.search(pattern, text)), "it failed")


def _is_bucket(text: str) -> bool:
    return re.search(NO_BUCKET, text) is not None


def short(text: str) -> str:
    """The library's words without its inner state, and without queries, which may hold a signature."""
    return re.sub(r"\?\S+", "", text.split("\n\nDebug source", 1)[0]).strip()
