"""Fetches files from object stores and web servers by ranges into a local file; ranges that arrived earlier are not
fetched again."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
import xxhash
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from holdfast.checkpoint.objects import CREDENTIALS, FAMILIES, advice_for, open_store, short
from holdfast.data.version import RemoteFileChanged, Version
from holdfast.errors import DataError, UsageError
from holdfast.observe.transfer_progress import ByteCount

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")

PART_BYTES = 8 << 20
PARTS_IN_FLIGHT = 8
PATIENCE_S = 45.0
PAUSES_S = (1.0, 5.0, 20.0)
"""Pauses between attempts at one request, in seconds, in addition to the library's own retries, which end after
PATIENCE_S."""
AGAIN = "The part that has arrived is kept and not fetched again"
FINAL = (PreconditionError, FileNotFoundError, PermissionError, PermissionDeniedError, UnauthenticatedError)
"""HTTP statuses that a retry cannot change."""

Answer = TypeVar("Answer")


class Remote:
    """One remote file."""

    def __init__(
        self,
        url: str,
        *,
        part_bytes: int = PART_BYTES,
        patience_s: float = PATIENCE_S,
        pauses_s: tuple[float, ...] = PAUSES_S,
        **options: Any,
    ) -> None:
        """No request is sent yet.

        Args:
            part_bytes: size of the range of one request.
            patience_s: how long one request is tried.
            pauses_s: how long to wait before each further attempt.
            options: of the object store, as for checkpoints; they take precedence over the environment.

        Raises:
            UsageError: `url` does not name a file.
        """
        parts = urlsplit(url)
        folder, _, self.name = parts.path.rpartition("/")
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if parts.scheme not in SCHEMES or not parts.netloc or not self.name:
            raise UsageError(
                f"{place}: not the URL of a remote file; use for example s3://bucket/corpus.npy (supported schemes: "
                f"{', '.join(SCHEMES)})"
            )
        if parts.query or parts.fragment or ("@" in parts.netloc and not parts.scheme.startswith("abfs")):
            raise UsageError(
                f"{place}: a URL of data must not have ?, # or @; put credentials into the environment"
            )
        self.url = url
        self.folder = f"{parts.scheme}://{parts.netloc}{folder}"
        self._credentials = CREDENTIALS.get(FAMILIES.get(parts.scheme, parts.scheme), "")
        self._part_bytes, self._pauses_s = part_bytes, pauses_s
        if parts.scheme == "http":
            options["client_options"] = {"allow_http": True, **options.get("client_options", {})}
        self._store = open_store(self.folder, parts.scheme, patience_s, options)

    def version(self) -> Version:
        """Size and identity of the file as it is now.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: the server does not answer.
        """
        with self._explained("asked for"):
            return self._tried(lambda: _version_of(obstore.head(self._store, self.name)))

    def fetch(self, version: Version, part: Path) -> str:
        """Appends to the file `part` what is missing of it; returns the XXH3-128 of the whole file.

        Raises:
            Changed: the remote file is no longer this version; the content of `part` cannot be used.
            DataError: the server does not send it, or the disk is full. The bytes that arrived stay in `part`.
        """
        digest = xxhash.xxh3_128()
        with part.open("ab+") as file, ByteCount(sys.stderr, f"fetching {self.url}") as count:
            # Only complete parts count. The last one may have been cut off by the kill, at a byte that nobody
            # recorded.
            have = min(file.tell(), version.size) // self._part_bytes * self._part_bytes
            file.truncate(have)
            file.seek(0)
            for low in range(0, have, self._part_bytes):
                # What arrived earlier is hashed again, so the digest covers the bytes on the disk and not
                # only those that this process received.
                digest.update(file.read(min(self._part_bytes, have - low)))
            for data in self._parts(version, have):
                self._write(file, data)
                digest.update(data)
                count.add(len(data))
            # The caller renames the file and trusts its name from then on.
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _write(self, file: Any, data: memoryview) -> None:
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            raise DataError(
                f"{self.url}: cannot be written to {file.name}: {error.strerror}; free some space, or choose another "
                "folder with --data-cache"
            ) from error

    def _parts(self, version: Version, begin: int) -> Iterator[memoryview]:
        """Yields the rest of the file, in order; several ranges are requested at once."""
        lows = iter(range(begin, version.size, self._part_bytes))
        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            waiting: deque[Future[memoryview]] = deque()
            try:
                for low in lows:
                    high = min(low + self._part_bytes, version.size)
                    waiting.append(pool.submit(self._part, version, low, high))
                    # Bounded in number and handed out in order: memory stays at PARTS_IN_FLIGHT parts, and
                    # the file grows from its beginning, which is what makes it resumable.
                    if len(waiting) == PARTS_IN_FLIGHT:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except BaseException:
                # Requests that no thread has begun are cancelled: after an error their results are not
                # needed.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _part(self, version: Version, low: int, high: int) -> memoryview:
        with self._explained("fetched"):
            return self._tried(lambda: self._asked(version, low, high))

    def _tried(self, ask: Callable[[], Answer]) -> Answer:
        for pause_s in self._pauses_s:
            try:
                return ask()
            # Retrying an error that cannot change would delay the message about a misspelt name or a missing
            # permission by minutes.
            except FINAL:
                raise
            except (BaseError, OSError):
                time.sleep(pause_s)
        return ask()

    def _asked(self, version: Version, low: int, high: int) -> memoryview:
        options: dict[str, Any] = {"range": (low, high)}
        # The server itself refuses a range of another version. Stores without an e-tag are caught below, by
        # size and time of each answer.
        if version.e_tag is not None:
            options["if_match"] = version.e_tag
        answer = obstore.get(self._store, self.name, options=options)  # type: ignore[arg-type]
        if _version_of(answer.meta) != version:
            raise RemoteFileChanged
        data = memoryview(answer.bytes())
        if len(data) != high - low:
            raise OSError(f"IncompleteBody: received {len(data)} bytes instead of {high - low}")
        return data

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except PreconditionError as error:
            raise RemoteFileChanged from error
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.url} does not exist; check the URL") from error
        except (BaseError, OSError) as error:
            advice = advice_for(str(error)).format(credentials=self._credentials, again=AGAIN)
            raise DataError(f"{self.url} could not be {what}: {advice} [{short(str(error))}]") from error


def _version_of(meta: obstore.ObjectMeta) -> Version:
    return Version(meta["size"], meta["e_tag"], meta["last_modified"].isoformat())
