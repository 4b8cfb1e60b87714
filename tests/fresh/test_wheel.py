"""What `make wheel` builds, installed into an empty environment: the README's first hour works with nothing else."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


def run(*command: object, **more) -> str:
    ran = subprocess.run(
        [*map(str, command)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        **more,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    return ran.stdout


def needed(
    name: str, found: dict[str, importlib.metadata.Distribution]
) -> dict[str, importlib.metadata.Distribution]:
    """An installed distribution and all that it requires here."""
    if name not in found:
        found[name] = importlib.metadata.distribution(name)
        for requirement in found[name].requires or []:
            other = re.match(r"[\w.-]+", requirement)[0]
            if "extra ==" not in requirement:
                try:
                    needed(other, found)
                except importlib.metadata.PackageNotFoundError:
                    continue  # of another platform
    return found


@pytest.fixture
def environment(tmp_path) -> Path:
    """Empty but for PyTorch, of which a user has a build already: gigabytes that nobody downloads for a test."""
    made = tmp_path / "environment"
    venv.create(made, with_pip=True)
    there = Path(sysconfig.get_path("purelib", vars={"base": str(made), "platbase": str(made)}))
    for distribution in needed("torch", {}).values():
        tops = {path.parts[0] for path in distribution.files or [] if path.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (there / top).exists():
                (there / top).symlink_to(distribution.locate_file(top))
    return made / "bin"


@pytest.mark.nightly
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_wheel_is_all_that_the_first_hour_needs(environment, tmp_path):
    # A copy: setuptools builds in the tree, and would take along what an older build left there.
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(environment / "python", "-m", "pip", "install", f"{wheel}[train]")
    assert "No broken requirements" in run(environment / "python", "-m", "pip", "check")

    work = tmp_path / "work"
    work.mkdir()
    page = (ROOT / "README.md").read_text()
    (work / "train.py").write_text(re.search(r"^```python file=train.py\n(.*?)^```$", page, re.M | re.S)[1])
    variables = {
        "PATH": f"{environment}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HOLDFAST_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    assert re.search(r"step 180: loss \d", run("python", "train.py", cwd=work, env=variables))
    commands = re.search(r"^```sh\npython train.py\n(.*?)^```$", page, re.M | re.S)[1]
    said = run("bash", "-euc", commands, cwd=work, env=variables)
    assert "200 committed, 0 lost" in said
    assert "restored from peers" in said
