"""The page in a real browser, on a job that is running and loses workers and its coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import typer

from holdfast.cli.app import app
from holdfast.coordinator.service.store import Store
from holdfast.protocol.endpoint import read_endpoint

pytestmark = [pytest.mark.look, pytest.mark.timeout(300)]
browser = pytest.importorskip("browser")
TINY = Path(__file__).parents[1] / "faults/train_tiny.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job that trains until the tests are done."""
    home = tmp_path_factory.mktemp("home")
    command = [
        *browser.CLI,
        "run",
        "--job",
        "seen",
        "--nnodes",
        "2:3",
        "--spares",
        "1",
        "--max-restarts",
        "50",
        "--no-ui",
    ]
    command += [
        "--checkpoint",
        f"{home}/saved,every=100",
        "--fault",
        "kill-worker:step=30",
        str(TINY),
        "1000000",
    ]
    environment = os.environ | {"HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1"}
    log = (home / "log").open("wb")
    with (
        subprocess.Popen([*command, "--device-s", "0.01"], env=environment, stdout=log, stderr=log) as job,
        log,
    ):
        try:
            browser.until(
                lambda: b"incident 1: full strength" in (home / "log").read_bytes(), 120, "an incident"
            )
            yield home
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(60)


@pytest.fixture(scope="module")
def link(home: Path) -> Iterator[str]:
    with browser.ui(home, "--act") as link:
        yield link


@pytest.fixture(scope="module")
def seen(link: str) -> Iterator[object]:
    with closing(browser.Browser()) as one:
        one.open(link)
        yield one


def test_it_opens_live_and_asks_nobody_else(seen, link) -> None:
    origin = link.partition("/enter")[0]
    seen.wait("return holdfast.link === 'live'")
    assert seen.run("return document.querySelector('h1').innerText").strip().startswith("training, step")
    for view in ("#/training", "#/incident/1", "#/all-incidents", "#/"):
        seen.view(view)
    titles = seen.run("return [...document.querySelectorAll('h2')].map(e => e.innerText)")
    assert titles == [
        "What you have to do", "Incidents", "Decisions, and why", "If all died now", "Nodes in time", "Ranks", "Who holds it up",
        "Change something",
    ]  # fmt: skip
    asked = seen.requests()
    assert asked
    assert [x for x in asked if not x.startswith((origin, "data:"))] == []
    assert seen.complaints() == []
    step = seen.run("return holdfast.now.step")
    seen.wait(f"return holdfast.now.step > {step}")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(seen, dark: bool) -> None:
    seen.dark(dark)
    seen.wait(f"return document.documentElement.dataset.theme === '{'dark' if dark else 'light'}'")
    try:
        for view in ("#/", "#/training", "#/incident/1"):
            seen.view(view)
            assert seen.findings() == [], view
    finally:
        seen.dark(False)


def test_a_phone_needs_no_scrolling_sideways(seen) -> None:
    seen.size(320, 700)
    try:
        for view in ("#/", "#/training", "#/incident/1"):
            seen.view(view)
            wide = seen.run(
                "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            )
            assert wide[0] <= wide[1] <= 320, view
    finally:
        seen.size(1280, 900)


def test_the_keyboard_reaches_every_panel(seen) -> None:
    seen.view("#/")
    reached = seen.run(
        "return [...document.querySelectorAll('section.panel')].map(s => !!s.querySelector('a, button, input, [tabindex=\"0\"]'))"
    )
    assert reached
    assert all(reached)
    assert seen.run("return document.querySelectorAll('[aria-live]').length") == 1


def test_every_panel_has_a_link_its_data_and_a_command(seen, link) -> None:
    origin = link.partition("/enter")[0]
    known = typer.main.get_command(app).commands
    for view in ("#/", "#/training", "#/incident/1", "#/all-incidents", "#/all-decisions"):
        seen.view(view)
        panels = seen.run(
            "return [...document.querySelectorAll('section.panel')].map(s => ({id: s.id,"
            " link: s.querySelector('h2 a').getAttribute('href'),"
            " data: s.querySelector('.ways a') && s.querySelector('.ways a').href,"
            " command: s.querySelector('.ways code') && s.querySelector('.ways code').innerText}))"
        )
        assert panels
        for panel in panels:
            assert panel["link"] == f"#/{panel['id']}"
            if panel["id"] == "actions":  # it shows nothing; each action says its command before it is done
                continue
            assert panel["data"].startswith(f"{origin}/api/v1/"), panel
            status, kind = seen.run(
                "return fetch(arguments[0]).then(r => r.json().then(() => [r.status, r.headers.get('content-type')]))",
                panel["data"],
            )
            assert (status, kind.split(";")[0]) == (200, "application/json"), panel
            assert panel["command"].startswith("holdfast "), panel
            assert panel["command"].split()[1] in known, panel


def test_an_incident_is_opened_and_left_by_keys_alone(seen) -> None:
    seen.view("#/")
    seen.run("document.activeElement.blur()")
    focused = "const e = document.activeElement; return [e.getAttribute('href'), e.tagName, e.innerText]"
    reached = []
    for _ in range(200):
        seen.key("Tab")
        reached.append(seen.run(focused))
        # A person has to see where they are.
        assert seen.run(
            "const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none'"
        ), reached[-1]
        if reached[-1][0] == "#/incident/1":
            break
    assert reached[-1][0] == "#/incident/1", reached
    seen.key("Enter")
    seen.wait("return document.querySelector('pre.story')")
    for _ in range(50):
        seen.key("Tab")
        if seen.run(focused)[2] == "Back":
            break
    seen.key("Enter")
    seen.wait("return location.hash === '#/' && document.querySelector('#incidents')")


def test_a_killed_coordinator_costs_no_event(seen, home: Path) -> None:
    seen.view("#/")
    for _ in range(2):
        first = seen.run("return holdfast.last")
        before = read_endpoint(home / "jobs/seen")
        os.kill(before.pid, signal.SIGKILL)
        browser.until(
            lambda was=before.pid: read_endpoint(home / "jobs/seen").pid != was, 60, "another coordinator"
        )
        seen.wait(f"return holdfast.link === 'live' && holdfast.last > {first}")
    # What is in the ledger now comes, each once and in order.
    with closing(Store(home / "jobs/seen/job.sqlite", read_only=True)) as store:
        newest = store.last_seq()
    seen.wait(f"return holdfast.last >= {newest}")
    seqs = seen.run("return holdfast.seqs")
    with closing(Store(home / "jobs/seen/job.sqlite", read_only=True)) as store:
        wanted = [e.seq for e in store.events(seqs[0] - 1) if e.seq <= seqs[-1]]
    assert seqs == wanted


def test_what_happens_behind_another_view_is_there_when_one_comes_back(seen, home: Path) -> None:
    seen.view("#/")
    shown = "return document.querySelector('#incidents .head').innerText"
    # Of the ledger: where the coordinator was killed just now, the page may not have that incident yet.
    with closing(Store(home / "jobs/seen/job.sqlite", read_only=True)) as store:
        count = sum(e.kind == "incident-opened" for e in store.events(0))
    seen.wait(f"{shown}.includes('{count} incident')")
    seen.view("#/training")
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    subprocess.run([*browser.CLI, "fault", "kill-worker", "--job", "seen"], env=environment, check=True)
    report = f"incident {count + 1}: full strength".encode()
    browser.until(lambda: report in (home / "log").read_bytes(), 60, "another incident")
    seen.view("#/")
    seen.wait(f"{shown}.includes('{count + 1} incidents')")


def test_a_change_says_first_what_it_would_do(seen) -> None:
    seen.view("#/actions")
    click = "[...document.querySelectorAll('#actions button')].find(b => b.innerText === {}).click()"
    seen.run(click.format("'Resize'"))
    seen.wait("return document.querySelector('#actions input')")
    seen.run(
        "const i = document.querySelector('#actions input'); i.value = '2'; i.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    seen.run(click.format("'What would happen?'"))
    told = seen.wait("const e = document.querySelector('#actions [role=status]'); return e && e.innerText")
    assert "from 3 to 2 nodes" in told
    assert seen.run("return holdfast.now.target") == 3
    seen.run(click.format("'Resize: yes'"))
    seen.wait("return holdfast.now.target === 2 && holdfast.now.world === 2")


def test_who_may_look_sees_no_way_to_change(home: Path) -> None:
    with browser.ui(home) as link, closing(browser.Browser()) as one:
        one.open(link)
        one.wait("return holdfast.link === 'live'")
        assert "Change something" not in one.run("return document.body.innerText")
        assert (
            one.run(
                "return fetch('api/v1/act/stop', {method: 'POST', headers: {'X-Holdfast': '1'}}).then(r => r.status)"
            )
            == 403
        )


def test_one_file_needs_nothing_else(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    subprocess.run(
        [*browser.CLI, "ui", "--html", str(path)], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    with closing(browser.Browser()) as one:
        one.open(path.as_uri())
        for view in ("#/training", "#/incident/1", "#/"):
            one.view(view)
        assert "Incidents" in one.run("return document.body.innerText")
        assert [x for x in one.requests() if not x.startswith(("file:", "data:"))] == []
        assert one.complaints() == []
