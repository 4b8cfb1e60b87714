"""A small S3 server that misbehaves on demand: what the object-store tier must live through."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "bucket"


@dataclass
class Request:
    """What a client asked. kind: put, get, head, delete, list, begin, part, complete, abort or bulk."""

    kind: str
    key: str
    query: dict[str, str]
    headers: Any
    body: bytes = b""


@dataclass
class Fault:
    """What happens instead of the answer, the next `times` times that a request is of one of `kinds`.

    how: `status` (with `code` as S3 writes it), `stall` (no answer), `drop` (the connection ends in the middle of
    the request's body), `cut` (it ends in the middle of the answer's), `halt` (nothing comes after the middle of the
    answer's), or `lost` (all is done, and no answer sent).
    """

    kinds: tuple[str, ...]
    how: str
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    when: Callable[[Request], bool] = lambda request: True


@dataclass
class S3Server:
    """Serves one bucket on loopback; `with` starts and stops it.

    objects: key to bytes. uploads: id to key and parts, for multipart uploads neither completed nor aborted.
    denied: keys that cannot be deleted. asked: what was asked, oldest first, bodies left out.
    """

    bucket: str = BUCKET
    page: int = 1000
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    asked: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> S3Server:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.s3 = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def fault(self, kinds: str, how: str, **more: Any) -> None:
        """See `Fault`. kinds: separated by blanks."""
        self.faults.append(Fault(tuple(kinds.split()), how, **more))

    def count(self, kind: str) -> int:
        """Requests of a kind so far."""
        with self.lock:
            return sum(r.kind == kind for r in self.asked)

    def take_fault(self, request: Request) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if request.kind in fault.kinds and fault.times > 0 and fault.when(request):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # a client that gave up
            self.close_connection = True

    def do_any(self) -> None:
        s3: S3Server = self.server.s3  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        request = Request(self._kind(query, key), key, query, self.headers)
        with s3.lock:
            s3.asked.append(Request(request.kind, key, query, self.headers))
        fault = s3.take_fault(request)
        length = int(self.headers.get("Content-Length") or 0)
        if fault and fault.how == "drop":
            self.rfile.read(length // 2)
            self._hang_up()
            return
        request.body = self.rfile.read(length)
        if fault and fault.how == "stall":
            s3.closing.wait()
            self._hang_up()
            return
        if fault and fault.how == "status":
            self._refuse(fault.status, fault.code)
            return
        if bucket != s3.bucket:
            self._refuse(404, "NoSuchBucket")
            return
        with s3.lock:
            status, headers, body = getattr(self, f"_{request.kind}")(s3, request)
        if fault and fault.how == "lost":
            self._hang_up()
            return
        self._answer(status, body, headers, fault.how if fault else "")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any

    def _kind(self, query: dict[str, str], key: str) -> str:
        match self.command:
            case "POST":
                return "bulk" if "delete" in query else "begin" if "uploads" in query else "complete"
            case "PUT":
                return "part" if "partNumber" in query else "put"
            case "DELETE":
                return "abort" if "uploadId" in query else "delete"
            case "GET" if not key:
                return "list"
        return self.command.lower()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}, by the test</Message></Error>".encode()
        self._answer(status, body if self.command != "HEAD" else b"")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, how: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if how not in ("cut", "halt"):
            self.wfile.write(body if self.command != "HEAD" else b"")
            return
        self.wfile.write(body[: len(body) // 2])
        if how == "halt":
            self.server.s3.closing.wait()  # type: ignore[attr-defined]
        self._hang_up()

    # ------------------------------------------------------------ each kind: status, headers, body

    def _put(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        s3.objects[r.key] = r.body
        return 200, {"ETag": _etag(r.body)}, b""

    def _head(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        if r.key not in s3.objects:
            return 404, {}, b""
        data = s3.objects[r.key]
        return 200, {"Content-Length": str(len(data)), "ETag": _etag(data), "Last-Modified": _DAY}, b""

    def _get(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        if r.key not in s3.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        data = s3.objects[r.key]
        headers = {"ETag": _etag(data), "Last-Modified": _DAY}
        asked = r.headers.get("Range")
        if not asked:
            return 200, headers, data
        low, _, high = asked.removeprefix("bytes=").partition("-")
        begin, end = int(low), min(int(high) + 1 if high else len(data), len(data))
        if begin >= len(data):
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        return 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}, data[begin:end]

    def _delete(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        s3.objects.pop(r.key, None)
        return 204, {}, b""

    def _bulk(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        keys = [e.text or "" for e in ElementTree.fromstring(r.body).iter() if e.tag.endswith("Key")]
        said = ""
        for key in keys:
            if key in s3.denied:
                said += (
                    f"<Error><Key>{escape(key)}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
                )
            else:
                s3.objects.pop(key, None)
                said += f"<Deleted><Key>{escape(key)}</Key></Deleted>"
        return 200, {}, f"<DeleteResult>{said}</DeleteResult>".encode()

    def _list(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = r.query.get("prefix", ""), r.query.get("delimiter", "")
        after = r.query.get("continuation-token", "")
        found: dict[str, bytes | None] = {}
        for key in sorted(s3.objects):
            if not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            found[prefix + head + cut if cut else key] = None if cut else s3.objects[key]
        names = [n for n in sorted(found) if n > after]
        shown, more = names[: s3.page], len(names) > s3.page
        rows = "".join(
            f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>"
            if (data := found[n]) is None
            else f"<Contents><Key>{escape(n)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{_etag(data)}</ETag><Size>{len(data)}</Size></Contents>"
            for n in shown
        )
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        said = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
        return 200, {}, f"<ListBucketResult>{said}</ListBucketResult>".encode()

    def _begin(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        upload = uuid.uuid4().hex
        s3.uploads[upload] = (r.key, {})
        said = f"<Bucket>{s3.bucket}</Bucket><Key>{escape(r.key)}</Key><UploadId>{upload}</UploadId>"
        return 200, {}, f"<InitiateMultipartUploadResult>{said}</InitiateMultipartUploadResult>".encode()

    def _part(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        if r.query["uploadId"] not in s3.uploads:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        s3.uploads[r.query["uploadId"]][1][int(r.query["partNumber"])] = r.body
        return 200, {"ETag": _etag(r.body)}, b""

    def _complete(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        if r.query["uploadId"] not in s3.uploads:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        key, parts = s3.uploads[r.query["uploadId"]]
        numbers = [
            int(e.text or 0) for e in ElementTree.fromstring(r.body).iter() if e.tag.endswith("PartNumber")
        ]
        etags = [e.text for e in ElementTree.fromstring(r.body).iter() if e.tag.endswith("ETag")]
        if etags != [_etag(parts[n]) for n in numbers] or numbers != list(range(1, len(numbers) + 1)):
            return 400, {}, b"<Error><Code>InvalidPart</Code></Error>"
        del s3.uploads[r.query["uploadId"]]
        s3.objects[key] = b"".join(parts[n] for n in numbers)
        said = f"<Key>{escape(key)}</Key><ETag>{_etag(s3.objects[key])}</ETag>"
        return 200, {}, f"<CompleteMultipartUploadResult>{said}</CompleteMultipartUploadResult>".encode()

    def _abort(self, s3: S3Server, r: Request) -> tuple[int, dict[str, str], bytes]:
        s3.uploads.pop(r.query["uploadId"], None)
        return 204, {}, b""


_DAY = "Thu, 01 Jan 2026 00:00:00 GMT"


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
