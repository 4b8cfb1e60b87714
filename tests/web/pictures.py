"""`make pictures`: the pictures of docs/page.md, of a job that runs for them: both views, light and dark, an incident, and a
phone; and that of docs/plan.md, of a simulated job whose rack loses power.

pictures.py FOLDER
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from browser import CLI, ROOT, Browser, simulated, ui, until
from PIL import Image

FAULTS = (
    "nan:step=40",
    "kill-worker:step=120",
    "kill-node:step=220",
    "kill-coordinator:step=360",
    "deadlock:step=500",
)
MOST = 150_000
"""Bytes of a picture."""
SHOTS = (
    ("page-light", "#/", 1200, False, 1500),
    ("page-dark", "#/", 1200, True, 1500),
    ("page-training-light", "#/training", 1200, False, 1400),
    ("page-training-dark", "#/training", 1200, True, 1400),
    ("page-incident", "#/incident/5", 1200, False, 1500),
    ("page-phone", "#/", 320, False, 900),
)


@contextmanager
def job(home: Path) -> Iterator[None]:
    """A job that trains, after one incident of each kind."""
    command = [
        *CLI,
        "run",
        "--job",
        "demo",
        "--nnodes",
        "3",
        "--spares",
        "3",
        "--max-restarts",
        "20",
        "--no-ui",
        "--health-rules",
        str(ROOT / "tests/web/rules.toml"),
    ]
    command += [f"--fault={fault}" for fault in FAULTS]
    command += [
        "--checkpoint",
        f"{home}/checkpoints,every=50",
        # Beside the job: the stack on its page has the path.
        shutil.copy(ROOT / "tests/web/train_seen.py", home / "train.py"),
        "1000000",
        "0.005",
        "560",
    ]
    environment = os.environ | {"HOLDFAST_HOME": str(home), "OMP_NUM_THREADS": "1"}
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as launcher,
    ):
        try:
            until(lambda: b"incident 5: full strength" in (home / "log").read_bytes(), 300, "five incidents")
            until(lambda: b"row-remapping" in (home / "log").read_bytes(), 60, "a finding")
            yield
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)


def small(path: Path) -> None:
    """With 128 colours: a page has few, and a picture of it a third of the bytes."""
    whole = Image.open(path).convert("RGB")
    whole.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    if size > MOST:
        raise SystemExit(f"{path.name} has {size:,} bytes, more than {MOST:,}")


def struck(folder: Path) -> None:
    """The page over a simulated job, after a worker was killed, and while a rack without power is an open incident."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as home,
        simulated(Path(home), "--job", "simulated") as link,
        closing(Browser(1200, 900)) as one,
    ):
        one.open(link)
        one.wait("return document.querySelector('.tile')")
        press = (
            "[...document.querySelectorAll('#cluster button')].find(b => b.innerText.trim() === '{}').click()"
        )
        one.run(press.format("10×"))
        one.run("holdfast.act('strike', {target: 'rank-1000', kind: 'kill-worker'})")
        one.wait("return holdfast.now.open.length")
        one.wait("return !holdfast.now.open.length && holdfast.now.step > 20", 60)
        one.run(press.format("1×"))
        one.run("document.getElementById('map-rack-21').click()")
        one.wait("return document.querySelectorAll('.nodes li').length === 16")
        one.run(press.format("Power off the rack"))
        one.wait("return holdfast.now.open.length && document.querySelector('.nodes .cell-l')")
        one.view("#/")
        one.wait("return document.getElementById('map-rack-21').getAttribute('aria-label').includes('gone')")
        one.picture(folder / "simulated.png", 1080)
    small(folder / "simulated.png")


def main() -> int:
    folder = Path(sys.argv[1])
    struck(folder)
    with tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as made, job(Path(made)):
        for name, view, width, dark, most in SHOTS:
            with ui(Path(made)) as link, closing(Browser(width, 900, dark)) as one:
                one.open(link)
                one.view(view)
                one.picture(folder / f"{name}.png", most)
            small(folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
