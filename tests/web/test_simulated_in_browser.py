"""The page over a simulated job of 2,000 nodes in a real browser: racks, switches and ranks are struck, and the core decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytestmark = [pytest.mark.look, pytest.mark.timeout(300)]
browser = pytest.importorskip("browser")

TILE = "document.getElementById('map-{}')"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def link(home: Path) -> Iterator[str]:
    with browser.simulated(home, "--job", "seen") as link:
        yield link


@pytest.fixture(scope="module")
def seen(link: str) -> Iterator[object]:
    with closing(browser.Browser()) as one:
        one.open(link)
        one.wait("return holdfast.link === 'live' && document.querySelector('.tile')")
        yield one


def press(seen: object, words: str) -> None:
    seen.run(
        "[...document.querySelectorAll('#cluster button')].find(b => b.innerText.trim() === arguments[0]).click()",
        words,
    )


def label(seen: object, what: str) -> str:
    return seen.run(f"return {TILE.format(what)}.getAttribute('aria-label')")


def recovered(seen: object, incidents: int) -> None:
    """Until so many incidents are known, all of them are closed, and steps follow each other again."""
    seen.wait(
        "const list = holdfast.panels[holdfast.address('incidents', {count: 8})];"
        f"return list && list.all === {incidents} && list.incidents.every(i => !i.open) && !holdfast.now.open.length",
        60,
    )
    step = seen.run("return holdfast.now.step")
    seen.wait(f"return holdfast.now.step > {step} && holdfast.now.phase === 'running'")


def test_it_says_that_it_is_simulated_and_draws_few_elements_for_many_nodes(seen, link) -> None:
    assert "(simulated)" in seen.run("return document.title")
    assert seen.run("return document.querySelector('h1').innerText").split()[:2] == ["simulated", "training,"]
    assert seen.run("return document.querySelectorAll('.tile').length") == 128
    assert seen.run("return document.querySelectorAll('#cluster *').length") < 600
    origin = link.partition("/enter")[0]
    assert [x for x in seen.requests() if not x.startswith((origin, "data:"))] == []
    assert seen.complaints() == []


def test_a_rack_that_is_chosen_by_keys_is_struck_and_the_job_recovers(seen) -> None:
    press(seen, "10×")
    seen.wait("return holdfast.now.simulated.speed === 10")
    seen.run(f"{TILE.format('switch-0')}.focus()")
    for key in ("arrow_down", "arrow_down", *["arrow_right"] * 6, "enter"):
        seen.key(key)
    seen.wait("return document.querySelectorAll('.nodes li').length === 16")
    assert seen.run("return document.activeElement.id") == "map-rack-21"
    assert label(seen, "rack-21") == "rack-21: 16 nodes: all training"
    press(seen, "Power off the rack")
    told = seen.wait("return document.querySelector('.told').innerText")
    assert told.endswith("rack-21 loses power: 16 nodes.")
    # What happens next is the core's: it hears nothing of 16 nodes, and says so in the headline and in an incident.
    seen.wait("return document.querySelector('.headline').innerText.includes('switch-2/rack-21')")
    recovered(seen, 1)
    assert label(seen, "rack-21") == "rack-21: 16 nodes: all gone"
    assert label(seen, "rack-125").startswith("rack-125: 16 nodes:")
    assert seen.run("return [holdfast.now.world, holdfast.now.spares]") == [2000, 32]
    cause = seen.run("return document.querySelector('#incidents td.text').innerText")
    assert cause == "16 of 16 nodes in switch-2/rack-21 were lost together (silent for 2 s)"


def test_a_rank_is_found_by_its_number_and_struck(seen) -> None:
    seen.run(
        "const i = document.querySelector('.seek input'); i.value = 'rank 17'; i.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    press(seen, "Choose")
    seen.wait("return document.querySelector('.chosen h3').innerText === 'rank 17'")
    press(seen, "Kill the worker")
    assert "rank 17" in seen.wait("return document.querySelector('.told').innerText")
    recovered(seen, 2)
    shown = seen.run("return document.querySelector('#incidents tbody tr').innerText")
    assert "injected" in shown
    assert "rank 17" in shown
    seen.view("#/incident/2")
    assert "SIGKILL" in seen.wait("return document.querySelector('pre.story').innerText")
    seen.view("#/")


def test_what_is_gone_cannot_be_struck_again(seen) -> None:
    seen.run(f"{TILE.format('rack-21')}.click()")
    seen.wait("return document.querySelector('.chosen h3').innerText === 'rack 21'")
    press(seen, "Power off the rack")
    assert "nothing is left to strike" in seen.wait(
        "const e = document.querySelector('#cluster [role=alert]'); return e && e.innerText"
    )


def test_the_time_stands_still_while_it_is_paused(seen) -> None:
    press(seen, "Pause")
    seen.wait("return holdfast.now.simulated.speed === 0")
    time_s = seen.run("return holdfast.time()")
    # Of the page's own clock: a second later it shows the same.
    seen.wait(f"return performance.now() - holdfast.at > 1000 && holdfast.time() === {time_s}")
    press(seen, "10×")
    seen.wait(f"return holdfast.time() > {time_s}")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(seen, dark: bool) -> None:
    seen.dark(dark)
    seen.wait(f"return document.documentElement.dataset.theme === '{'dark' if dark else 'light'}'")
    try:
        assert seen.findings() == []
    finally:
        seen.dark(False)


def test_a_phone_needs_no_scrolling_sideways(seen) -> None:
    seen.size(320, 700)
    try:
        seen.view("#/")
        wide = seen.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1] <= 320
    finally:
        seen.size(1280, 900)


def test_nothing_of_it_is_loaded_for_a_job_that_is_not_simulated_now(home: Path, link: str) -> None:
    """In the page of all jobs the simulated one is a ledger like every other."""
    with browser.ui(home) as address, closing(browser.Browser()) as one:
        one.open(address)
        one.view("#/")
        assert "(simulated)" in one.run("return document.title")
        assert one.run("return document.getElementById('cluster')") is None
        assert [x for x in one.requests() if "simulated.js" in x or "simulated.css" in x] == []
