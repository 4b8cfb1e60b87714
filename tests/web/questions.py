"""What the page says to each of the twenty questions of docs/page.md, of one job: as text, and with a picture of each view.

questions.py HOME JOB FOLDER      HOME: as in $HOLDFAST_HOME, such as out/demo/home of `make demo`

Ask once while the job trains (the questions of the night), and once when it has ended.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from browser import Browser, ui

NIGHT = (
    ("Is it training now? Since when not?", ".headline"),
    ("Do I have to do something?", "#todo"),
    ("What happened, and whose fault is it?", "#incidents"),
    ("What was decided, why, and what not?", "#decisions"),
    ("Will it be over by itself, and when?", "#incidents .open-incident"),
    ("How much would be lost if all died now?", "#tiers"),
    ("One machine, or all?", "#nodes"),
    ("Which rank holds it up, and where does it stand?", "#stall"),
    ("What do its logs say?", "log"),
    ("Can I take a node away without harm?", "#nodes p"),
)
MORNING = (
    ("Is the loss as it should be?", "#loss"),
    ("Was a jump the data, the learning rate, or an event?", "#loss"),
    ("Were steps lost or done twice? Every sample once?", "#figures, #samples"),
    ("How fast, and slower than yesterday?", "#loss"),
    ("Where did the night go?", "#goodput"),
    ("What did it cost, and would another setting cost less?", "#cost"),
    ("When will it be done?", ".headline .facts"),
    ("Which checkpoints are there, and can they be read?", "#checkpoints"),
    ("Is a node or a rank slow?", "#ranks"),
    ("Did the run change?", "#launches"),
)
MOST = 700
"""Characters of an answer that are printed."""


def text(one: Browser, selector: str) -> str:
    found = one.run(
        f"return [...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText).join('\\n')"
    )
    return " | ".join(line.strip() for line in found.splitlines() if line.strip())


def log_of_a_rank(one: Browser) -> str:
    """As a person gets there: by the link in the row of a rank."""
    address = one.run(
        "const link = document.querySelector('#ranks a[href^=\"#/log/\"]'); return link && link.getAttribute('href')"
    )
    if address is None:
        return ""
    one.view(address)
    said = text(one, "section.panel")
    one.view("#/")
    return said


def main() -> int:
    home, job, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    with ui(home, "--job", job) as link, closing(Browser(1200, 900)) as one:
        one.open(link)
        for view, asked in (("#/", NIGHT), ("#/training", MORNING)):
            one.view(view)
            for question, where in asked:
                if where == "#ranks":
                    one.view("#/")
                said = log_of_a_rank(one) if where == "log" else text(one, where)
                if where == "#ranks":
                    one.view(view)
                print(f"{question}\n    {said[:MOST] or '(nothing)'}\n", flush=True)
            one.picture(folder / f"{job}-{view.strip('#/') or 'job'}.png", 3000)
            one.size(1200, 900)
    return 0


if __name__ == "__main__":
    sys.exit(main())
