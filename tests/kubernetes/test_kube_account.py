"""An operator in a pod, whose token the kubelet renews in its file."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fakeapi import FakeApi, event, refused

from holdfast.kubernetes.client.api import (
    Api,
    ApiError,
    Backoff,
    Object,
    connect,
    current_namespace,
    open_client,
)
from holdfast.kubernetes.client.informer import Informer
from holdfast.kubernetes.client.leader import Lease, LeaseTimes

pytest.importorskip("kubernetes_asyncio")
PODS = "/api/v1/pods"
ONE = f"{PODS}/one"
REQUEST = (
    *(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ),
    *("-subj", "/CN=apiserver", "-addext", "subjectAltName=IP:127.0.0.1"),
    *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
)


class Knowing(FakeApi):
    """Answers who shows the token `known`, and nobody else. A watch that is open stays open, as with a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.known = "first"
        self.objects[ONE] = {"metadata": {"name": "one", "resourceVersion": "9"}}
        self.shown: asyncio.Queue[str] = asyncio.Queue()
        """Tokens that it did not know."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if shown != f"Bearer {self.known}":
            self.shown.put_nowait(shown)
            return refused(401, "Unauthorized", {})
        return await super().answer(request)


class Account:
    """A pod's folder with its account, as the kubelet projects it: files are links to `..data/`, and that is one to a folder."""

    def __init__(self, folder: Path, ca: Path) -> None:
        self.folder, self._ca, self._times = folder, ca, 0
        self.renew("first")
        for name in ("token", "ca.crt"):
            (folder / name).symlink_to(f"..data/{name}")

    def renew(self, token: str) -> None:
        self._times += 1
        data, made = self.folder / "..data", self.folder / f"..2026_{self._times}"
        made.mkdir()
        (made / "token").write_text(token)
        shutil.copy(self._ca, made / "ca.crt")
        before = data.resolve() if data.exists() else None
        (self.folder / "..data_tmp").symlink_to(made.name)
        (self.folder / "..data_tmp").replace(data)
        if before is not None:
            shutil.rmtree(before)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a server at 127.0.0.1, signed by itself, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("pki")
    made, key = folder / "ca.crt", folder / "key"
    subprocess.run(
        [*REQUEST, "-keyout", key, "-out", made],
        check=True,
        capture_output=True,
    )
    return made, key


Check = Callable[[Knowing, Account, Api], Awaitable[None]]


@pytest.fixture
def in_a_pod(
    certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Check], None]:
    """Plays with a server and a client that finds it as a pod does."""

    async def play(check: Check) -> None:
        fake, account = Knowing(), Account(tmp_path, certificate[0])
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        shown.load_cert_chain(*certificate)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", fake.answer)
        server = TestServer(app, scheme="https")
        await server.start_server(ssl=shown)
        async with server:
            monkeypatch.delenv("KUBECONFIG", raising=False)
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
            async with connect(account=account.folder) as api, asyncio.timeout(20):
                await check(fake, account, api)

    return lambda check: asyncio.run(play(check))


def test_the_request_after_a_renewal_shows_the_new_token(in_a_pod: Callable[[Check], None]) -> None:
    async def check(fake: Knowing, account: Account, api: Api) -> None:
        assert (await api.get(ONE))["metadata"]["name"] == "one"
        account.renew("second")
        with pytest.raises(ApiError, match="Unauthorized"):
            await api.get(ONE)
        fake.known = "second"
        assert (await api.get(ONE))["metadata"]["name"] == "one"
        assert fake.shown.get_nowait() == "Bearer second"
        # Either was refused once, in the moment when the server knew the other one.
        assert fake.shown.empty()

    in_a_pod(check)


@pytest.mark.parametrize("spoiled", [os.remove, lambda file: file.write_text("")], ids=["gone", "empty"])
def test_without_a_token_to_read_the_last_one_is_shown(
    in_a_pod: Callable[[Check], None], spoiled: Callable[[Path], object]
) -> None:
    async def check(fake: Knowing, account: Account, api: Api) -> None:
        await api.get(ONE)
        spoiled(account.folder / "..data" / "token")
        await api.get(ONE)
        assert fake.shown.empty()
        account.renew("second")
        fake.known = "second"
        await api.get(ONE)

    in_a_pod(check)


def test_a_watch_that_is_open_goes_on_and_the_next_one_shows_the_new_token(
    in_a_pod: Callable[[Check], None],
) -> None:
    async def check(fake: Knowing, account: Account, api: Api) -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        informer = watching(api, told)
        running = asyncio.create_task(informer.run())
        try:
            assert await told.get() == "one"
            assert await fake.watched.get() == "10"
            account.renew("second")
            fake.known = "second"
            # The answer of the watch that the first token opened, which then ends.
            fake.watches.put_nowait([event("ADDED", "two", 11)])
            assert await told.get() == "two"
            assert await fake.watched.get() == "11"
            assert fake.shown.empty()
            fake.watches.put_nowait([event("ADDED", "three", 12)])
            assert await told.get() == "three"
            assert informer.restarts == 0
        finally:
            await ended(running)

    in_a_pod(check)


def test_a_watch_waits_for_a_token_that_comes_late(in_a_pod: Callable[[Check], None]) -> None:
    """The API server was away until the first token's time was over, and it is back before the kubelet has asked for the next."""

    async def check(fake: Knowing, account: Account, api: Api) -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        informer = watching(api, told)
        running = asyncio.create_task(informer.run())
        try:
            assert await told.get() == "one"
            await fake.watched.get()
            fake.known = "second"
            fake.watches.put_nowait([])
            assert [await fake.shown.get() for _ in range(2)] == ["Bearer first"] * 2
            account.renew("second")
            assert await fake.watched.get() == "10"
            fake.watches.put_nowait([event("ADDED", "two", 11)])
            assert await told.get() == "two"
            assert informer.restarts == 0
        finally:
            await ended(running)

    in_a_pod(check)


def test_an_operator_that_is_not_known_yet_waits_for_its_lease(in_a_pod: Callable[[Check], None]) -> None:
    async def check(fake: Knowing, account: Account, api: Api) -> None:
        times = LeaseTimes(duration_s=3600.0, deadline_s=1800.0, every_s=0.01)
        led = asyncio.Event()

        async def work() -> None:
            led.set()
            await asyncio.Event().wait()

        fake.known = "second"
        leading = asyncio.create_task(Lease(api, "ops", "operator", "one", times).lead(work))
        try:
            assert [await fake.shown.get() for _ in range(2)] == ["Bearer first"] * 2
            assert not leading.done()
            account.renew("second")
            await led.wait()
        finally:
            await ended(leading)

    in_a_pod(check)


def test_the_kubeconfig_is_the_one_that_is_named_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library looks for its name when it is imported."""

    async def server(name: str) -> tuple[str, str]:
        file = tmp_path / name
        cluster = {"name": "c", "cluster": {"server": f"http://{name}.example.com"}}
        one = {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": name}}
        config = {"clusters": [cluster], "users": [{"name": "u", "user": {}}], "contexts": [one]}
        file.write_text(
            json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "one", **config})
        )
        monkeypatch.setenv("KUBECONFIG", str(file))
        async with open_client() as transport:
            return transport.configuration.host, current_namespace(None)

    for name in ("first", "second"):
        assert asyncio.run(server(name)) == (f"http://{name}.example.com", name)


def watching(api: Api, told: asyncio.Queue[str]) -> Informer:
    def tell(one: Object) -> None:
        told.put_nowait(one["metadata"]["name"])

    return Informer(
        api=api,
        path=PODS,
        query={},
        on_list=lambda all_, _: [tell(one) for one in all_],
        on_change=tell,
        on_gone=tell,
        backoff=Backoff(first_s=0.0),
    )


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
