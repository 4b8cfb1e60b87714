"""The page in a real browser, on a job that is running and loses workers and its coordinator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import typer

from holdfast.cli.app import app
from holdfast.coordinator.service.store import Store
from holdfast.protocol.network.endpoint import read_endpoint

pytestmark = [pytest.mark.look, pytest.mark.timeout(300)]
browser = pytest.importorskip("browser")
SEEN, RULES = Path(__file__).parent / "train_seen.py", Path(__file__).parent / "rules.toml"
VIEWS = ("#/", "#/training", "#/incident/1", "#/all-findings")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job that trains until the tests are done, and one before it that has ended."""
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
        "--health-rules",
        str(RULES),
        str(SEEN),
        "1000000",
        "0.01",
    ]
    environment = os.environ | {"HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1"}
    before = [*browser.CLI, "run", "--job", "before", "--nnodes", "1", "--no-ui", str(SEEN), "60"]
    subprocess.run(before, env=environment, check=True, capture_output=True)
    log = (home / "log").open("wb")
    with (
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as job,
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
        "What you have to do", "Incidents", "What health rules found", "Decisions, and why", "If all died now", "Nodes in time", "Ranks", "Who holds it up",
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
        for view in VIEWS:
            seen.view(view)
            assert seen.findings() == [], view
    finally:
        seen.dark(False)


def test_a_phone_needs_no_scrolling_sideways(seen) -> None:
    seen.size(320, 700)
    try:
        for view in VIEWS:
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
    for view in (*VIEWS, "#/all-incidents", "#/all-decisions"):
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


def test_an_incident_has_the_log_the_stack_and_the_finding_before_it(seen) -> None:
    seen.view("#/incident/1")
    said = seen.wait(
        "const e = document.querySelector('section.panel pre'); return e && e.closest('section').innerText"
    )
    assert "row-remapping" in said.partition("Story")[0]
    assert "row remapping is pending" in said.partition("End of the log")[2]
    # A log's colours go, and what would move a cursor is text.
    log = seen.run("return document.querySelector('pre[aria-label=\"End of the log\"]').innerText")
    assert "step 20: loss " in log
    assert "\\x1b[2K" in log
    assert "\x1b" not in log
    # It was killed: no stack, and the page says why and shows no empty box.
    assert "None: it wrote none: a process that is killed" in said
    assert seen.run("return [...document.querySelectorAll('pre')].every(e => e.innerText.trim())")
    assert "no earlier incident" in said


def test_times_are_by_the_clock_and_utc_on_hover(seen) -> None:
    seen.view("#/incident/1")
    shown, title, utc = seen.run(
        "const e = document.querySelector('section.panel .when time'); return [e.innerText, e.title, e.dateTime]"
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d", shown)
    assert title == utc.replace("T", " ").replace("Z", " UTC")
    assert seen.run("return Math.abs(Date.parse(arguments[0]) - Date.now()) < 600000", utc)
    # Of another day the date is there, too.
    seen.run("holdfast.now.began_utc_s -= 3 * 86400; holdfast.changed()")
    try:
        other = seen.wait(
            "const e = document.querySelector('section.panel .when time'); return / /.test(e.innerText) && e.innerText"
        )
        assert re.fullmatch(r"\d{1,2} \w{3,4} (\d{4} )?\d\d:\d\d:\d\d", other)
    finally:
        seen.run("holdfast.now.began_utc_s += 3 * 86400; holdfast.changed()")


def test_health_findings_are_on_the_view_and_on_the_curves(seen) -> None:
    seen.view("#/")
    said = seen.run("return document.querySelector('#findings').innerText")
    assert "row-remapping" in said
    assert "info: worth knowing, no harm" in said
    seen.view("#/training")
    marks = seen.run("return Object.entries(holdfast.panels).find(([k]) => k.includes('/series'))[1].marks")
    found = [m for m in marks if m["what"] == "finding" and "row-remapping" in m["text"]]
    assert found
    assert all(18 <= m["step"] <= 40 for m in found)
    # By keyboard, without the canvas.
    seen.run("document.querySelector('ul.marks').closest('details').open = true")
    assert "row-remapping" in seen.run("return document.querySelector('ul.marks').innerText")


def test_what_is_in_brackets_is_explained(seen) -> None:
    seen.view("#/")
    assert "(injected): put in on purpose" in seen.run(
        "return document.querySelector('#incidents').innerText"
    )
    assert seen.run("return document.querySelector('#incidents [title^=\"put in on purpose\"]') !== null")
    seen.view("#/incident/1")
    assert "spare: workers of other nodes" in seen.run("return document.body.innerText")


def test_logged_metrics_are_drawn_without_a_menu(seen) -> None:
    seen.view("#/training")
    seen.run("document.querySelector('.logged').scrollIntoView()")
    seen.wait("return document.querySelectorAll('.logged .uplot').length === 2")
    titles = seen.run("return [...document.querySelectorAll('.logged .title')].map(e => e.innerText)")
    assert titles == ["accuracy", "weights"]
    seen.run("scrollTo(0, 0)")


def test_how_curves_are_drawn_is_in_the_address(seen) -> None:
    seen.view("#/training")
    pressed = "return [...document.querySelectorAll('.curve button')].filter(b => b.ariaPressed === 'true').map(b => b.ariaLabel)"
    assert seen.run(pressed) == ["Gradient norm: logarithmic scale"]
    seen.run("document.querySelector('.controls').scrollIntoView()")
    # By keys alone: the slider, then the box, then the first curve's button.
    seen.run("document.querySelector('.controls input[type=range]').focus()")
    seen.key("Home")
    seen.wait("return new URLSearchParams(location.hash.split('?')[1]).get('smooth') === '0'")
    seen.key("Tab")
    seen.key("Space")
    seen.wait("return location.hash.includes('range=all')")
    seen.run("document.querySelector('.curve button').focus()")
    seen.key("Enter")
    seen.wait("return location.hash.includes('log=loss')")
    assert seen.run("return document.activeElement.ariaLabel") == "Loss: logarithmic scale"
    address = seen.run("return location.hash")
    seen.view("#/")
    assert (
        seen.run("return document.querySelector('nav[aria-label=Views] a:last-child').getAttribute('href')")
        == address
    )
    seen.view(address)
    assert seen.run(pressed) == ["Loss: logarithmic scale", "Gradient norm: logarithmic scale"]
    assert seen.run("return document.querySelector('.controls input[type=range]').value") == "0"
    assert seen.run("return document.querySelector('.controls input[type=checkbox]').checked")
    assert "moving average" not in seen.run("return document.querySelector('#loss').innerText")


def test_outliers_do_not_rule_an_axis_and_smoothing_is_an_average(seen) -> None:
    axis, full, few, line, bands = seen.run(
        "return import('holdfast/curves').then(({axisOf, smoothed}) => {"
        " const values = [...Array(1000).keys()].map(n => 1 + (n % 10) / 10); values[500] = 90; const plain = {log: false, zero: false};"
        " return [axisOf([values], {...plain, full: false}), axisOf([values], {...plain, full: true}),"
        " axisOf([[2.6, ...values.slice(0, 400)]], {...plain, full: false}), smoothed([4, null, 4, 8], 0.5),"
        " [0.01, 0.05].map(tail => axisOf([values.map((v, n) => n % 25 ? v : 90)], {...plain, full: false, tail}))]; })"
    )
    assert axis["cut"]
    assert 0 < axis["from"] < 1 < 1.9 < axis["to"] < 3
    assert not full["cut"]
    assert full["to"] > 90
    # Of a band a twentieth may be beyond: each of its points has the worst of many steps.
    assert [one["cut"] for one in bands] == [False, True]
    # What is only a little beyond the others is no outlier.
    assert not few["cut"]
    assert few["to"] > 2.6
    assert line == [4, None, 4, pytest.approx(4 + 4 * 0.5 / 0.875)]


def test_another_job_is_drawn_behind_the_curves(seen) -> None:
    seen.view("#/training?smooth=0")
    seen.wait("return [...document.querySelectorAll('.controls option')].some(o => o.value === 'before')")
    seen.run(
        "const s = document.querySelector('.controls select'); s.value = 'before'; s.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    seen.wait("return location.hash.includes('with=before') && location.hash.includes('smooth=0')")
    seen.wait("return document.querySelector('#loss').innerText.includes('The dashed line is before.')")
    seen.run("document.querySelector('#loss details:last-of-type').open = true")
    assert "loss of before" in seen.run(
        "return document.querySelector('#loss details:last-of-type').innerText"
    )
    # The link opens the same in a page that is loaded anew, and names the job: another one may be the newest by then.
    assert seen.run("return location.search") == "?job=seen"
    seen.driver.refresh()
    seen.wait(
        "return document.querySelector('#loss') && document.querySelector('#loss').innerText.includes('The dashed line is before.')"
    )
    seen.view("#/training?with=nobody")
    seen.wait("return document.querySelector('#loss .trouble')")


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
