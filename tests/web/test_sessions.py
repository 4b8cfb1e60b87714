"""Who may pass: a table of requests."""

from __future__ import annotations

import pytest

from holdfast.web.sessions import CODE_S, CODES_KEPT, COOKIE_S, Proxy, Role, Sessions

NOW = 1_000_000.0
GOOD = {"host": "127.0.0.1:8765"}


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def sessions(key: str = "token", port: int = 8765, clock: Clock | None = None) -> Sessions:
    return Sessions(key, port, clock or Clock(), frozenset({"login1"}))


def cookie(of: Sessions, role: Role = Role.VIEW) -> str:
    value = of.redeem(of.new_code(role))
    assert value is not None
    return f"{of.cookie}={value}"


@pytest.mark.parametrize(
    ("status", "method", "target", "headers"),
    [
        (200, "GET", "/", {}),
        (200, "GET", "/static/app.js", {}),
        (200, "GET", "/api/v1/now?job=x", {}),
        (200, "HEAD", "/api/v1/now", {}),
        # From elsewhere: DNS that was made to point here, another name, none at all.
        (421, "GET", "/", {"host": "evil.example:8765"}),
        (421, "GET", "/", {"host": "127.0.0.1.evil.example"}),
        (421, "GET", "/", {"host": ""}),
        (200, "GET", "/", {"host": "localhost:9000"}),
        (200, "GET", "/", {"host": "[::1]:8765"}),
        (200, "GET", "/", {"host": "LOGIN1:8765"}),
        # Nothing of the coordinator but the page.
        (401, "GET", "/ledger", {}),
        (401, "GET", "/watch", {}),
        (401, "POST", "/stop", {}),
        (401, "GET", "/static", {}),
        (401, "GET", "//static/app.js", {}),
        (401, "POST", "/page-code?role=act", {}),
        # No cookie, another's, one that was changed.
        (401, "GET", "/", {"cookie": ""}),
        (401, "GET", "/", {"cookie": "holdfast_8765=view.99999999999.00"}),
        (401, "GET", "/", {"cookie": "holdfast_8765=" + "x" * 5000}),
        (401, "GET", "/", {"cookie": "\x00\xff=;;;"}),
        (405, "PUT", "/api/v1/act/stop", {}),
        (403, "POST", "/api/v1/act/stop", {"origin": "http://127.0.0.1:8765", "x-holdfast": "1"}),
        (414, "GET", "/api/v1/now?" + "x" * 3000, {}),
        (403, "GET", "/enter?code=00", {}),
        (403, "GET", "/enter", {}),
    ],
)  # fmt: skip
def test_who_may_look(status: int, method: str, target: str, headers: dict[str, str]) -> None:
    of = sessions()
    assert of.judge(method, target, {"cookie": cookie(of), **GOOD, **headers})[0] == status


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"origin": "http://127.0.0.1:8765", "x-holdfast": "1"}),
        (403, {"origin": "http://127.0.0.1:8765"}),
        (403, {"x-holdfast": "1"}),
        (403, {"origin": "http://evil.example", "x-holdfast": "1"}),
        (403, {"origin": "http://127.0.0.1:9999", "x-holdfast": "1"}),
        (403, {"origin": "null", "x-holdfast": "1"}),
        (421, {"origin": "http://evil.example", "host": "evil.example", "x-holdfast": "1"}),
    ],
)
def test_who_may_act(status: int, headers: dict[str, str]) -> None:
    of = sessions()
    request = {**GOOD, "cookie": cookie(of, Role.ACT), **headers}
    assert of.judge("POST", "/api/v1/act/stop", request)[0] == status


def test_a_code_is_good_once_and_for_a_minute() -> None:
    clock = Clock()
    of = sessions(clock=clock)
    code = of.new_code(Role.VIEW)
    assert of.judge("GET", f"/enter?code={code}", GOOD)[0] == 200
    assert of.judge("POST", f"/enter?code={code}", GOOD)[0] == 403
    assert of.redeem(code) is not None
    assert of.redeem(code) is None
    assert of.judge("GET", f"/enter?code={code}", GOOD)[0] == 403
    late = of.new_code(Role.VIEW)
    clock.now += CODE_S + 1
    assert not of.is_code(late)
    assert of.redeem(late) is None
    first = of.new_code(Role.VIEW)
    for _ in range(CODES_KEPT):
        of.new_code(Role.VIEW)
    assert not of.is_code(first)


def test_a_cookie_is_good_with_the_next_coordinator_and_nowhere_else() -> None:
    clock = Clock()
    of = sessions(clock=clock)
    mine = cookie(of, Role.ACT)
    assert sessions(clock=clock).role(mine) is Role.ACT
    assert sessions(key="another job's", clock=clock).role(mine) is None
    assert sessions(port=8766, clock=clock).role(mine.replace("8765", "8766")) is None
    # A role cannot be raised, nor the end put off.
    assert of.role(cookie(of).replace("=view.", "=act.")) is None
    name, value = mine.split("=")
    role, until, signed = value.split(".")
    assert of.role(f"{name}={role}.{int(until) + 1}.{signed}") is None
    clock.now += COOKIE_S + 1
    assert of.role(mine) is None


HUB = "https://hub.example/user/ada/proxy/8765"


def test_a_proxy_has_one_name_for_the_pages_of_many_people() -> None:
    of = Sessions("token", 8765, Clock(), proxy=Proxy.of(HUB))
    # Its own alone: a cookie for all of the hub would be sent to everybody's servers there.
    assert of.cookie_path == "/user/ada/proxy/8765/"
    there = {"cookie": cookie(of, Role.ACT), "host": "hub.example", "x-holdfast": "1"}
    assert of.judge("GET", "/", there)[0] == 200
    assert sessions().judge("GET", "/", there)[0] == 421
    for host in (
        "hub.example",
        "localhost:8765",
    ):  # some proxies pass the browser's Host on, and some their own
        said = there | {"host": host}
        assert of.judge("POST", "/api/v1/act/stop", said | {"origin": "https://hub.example"})[0] == 200
        assert of.judge("POST", "/api/v1/act/stop", said | {"origin": "https://evil.example"})[0] == 403


@pytest.mark.parametrize(
    "url", ["hub.example/x", "ftp://hub/x", "https:///x", "https://hub/x;path=/", "https://hub/x?a=1", "https://a:b@hub/"]
)  # fmt: skip
def test_what_is_no_address_of_a_page(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|characters"):
        Proxy.of(url)
