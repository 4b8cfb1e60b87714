"""What the recipes' READMEs have a newcomer type. What a laptop can do is run here as it stands, shorter; of what needs a cluster
every file and key exists. `holdfast`'s own commands and options are parsed in `tests/docs`, and those of the planner compared in
`test_folders.py`."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from drive import Deed, Driver
from harness import end_leftovers, end_started, finish, start, wait_for
from test_recipes import PRELOAD

RECIPES = Path(__file__).parents[2] / "recipes"
READMES = sorted(RECIPES.rglob("README.md"))
FOLDERS = [path.parent for path in READMES if path.parent != RECIPES]
BLOCK = re.compile(r"^```sh excerpt\n((?:.*\n)*?)```$", re.MULTILINE)
CHANGE = re.compile(r"\w+\.\w+=\S+")
CLUSTER = re.compile(r"slurm\.sh|kubectl |plan memory|/data/")
"""What names one of these is for a cluster, or shown by another test."""
SHORTER = {"step=50": "step=3", "step=20": "step=3"}
each_readme = pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)


def blocks(readme):
    return BLOCK.findall(readme.read_text())


def commands(block):
    """As words, without what is put into the environment before them."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z]+=\S*", words[0]):
            words.pop(0)
        yield words


@each_readme
def test_every_block_of_shell_is_read_by_these_tests(readme):
    text = readme.read_text()
    assert len(re.findall(r"^```sh", text, re.MULTILINE)) == len(blocks(readme)) > 0
    for block in blocks(readme):
        for words in commands(block):
            known = words[0] in ("holdfast", "kubectl", "pip", "python") or words[0].endswith("/slurm.sh")
            assert known, f"nothing here looks at it: {shlex.join(words)}"


@each_readme
def test_every_file_that_it_names_exists(readme):
    named = re.findall(r"(?<![\w/.])recipes/[\w./-]+", "".join(blocks(readme)))
    assert [name for name in named if not (RECIPES.parent / name).is_file()] == []
    scripts = [words[0] for block in blocks(readme) for words in commands(block) if words[0].endswith(".sh")]
    assert all(os.access(RECIPES.parent / script, os.X_OK) for script in scripts)
    for file in re.findall(r"RECIPE=(\S+)", readme.read_text()):
        assert (readme.parent / file).is_file()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_change_that_it_suggests_is_one_that_its_script_takes(recipes, folder):
    """In commands and in its text."""
    suggested = CHANGE.findall((folder / "README.md").read_text().replace("`", " "))
    changes = [change for change in suggested if not change.startswith("job.")]
    assert changes
    for change in changes:
        config = recipes.config.read(folder / "tiny.toml", [change])
        if folder.name == "llama3-8b-dpo":
            recipes.checks.refuse_for_preferences(config)


def test_the_python_of_a_readme_can_be_read():
    for readme in READMES:
        for text in re.findall(r"^```python excerpt\n((?:.*\n)*?)```$", readme.read_text(), re.MULTILINE):
            compile(text, str(readme), "exec")


# ------------------------------------------------------------ typed for real


@pytest.fixture
def laptop(tmp_path):
    """A folder that looks like the top folder of a checkout, with a shell in it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/recipes").symlink_to(RECIPES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"HOLDFAST_HOME": str(tmp_path), "PATH": path, "OMP_NUM_THREADS": "1"}

    def type_in(text):
        """What a newcomer sees of it."""
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path / "work",
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout[-4000:]}"
        return ran.stdout

    yield type_in
    end_started()
    end_leftovers(tmp_path)


def shortened(block):
    """Fewer steps, and nothing is installed."""
    lines = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("pip install "):
            continue
        for long, short in SHORTER.items():
            line = line.replace(long, short)
        lines.append(f"{line} train.steps=8" if line.startswith("holdfast run ") else line)
    return "\n".join(lines)


def test_a_block_is_shortened_where_it_trains():
    block = "pip install x\nholdfast run --fault a:step=50 \\\n  b.toml\nholdfast why 1\n"
    assert (
        " ".join(shortened(block).split())
        == "holdfast run --fault a:step=3 b.toml train.steps=8 holdfast why 1"
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_what_it_says_for_a_laptop_works_as_it_is_typed(laptop, folder):
    pytest.importorskip("transformers", reason="needs pip install 'holdfast-train[recipes]'")
    if folder.name == "llama3-8b-dpo":
        pytest.importorskip("trl", reason="needs pip install 'holdfast-train[recipes,adapters]'")
    typed = [block for block in blocks(folder / "README.md") if not CLUSTER.search(block)]
    shown = [laptop(shortened(block)) for block in typed]
    # `holdfast why 1`, of the worker that it has killed.
    assert "rank 1" in shown[0], shown[0]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_they_say_of_a_job_that_trains_changes_no_bit(recipes, laptop, tmp_path):
    """Every line of the block in recipes/README.md, typed while the job trains, against a job without."""
    (block,) = blocks(RECIPES / "README.md")
    laptop(shortened(blocks(RECIPES / "llama3-8b-pretrain/README.md")[0].split("holdfast run")[0]))

    def type_later(line):
        async def act(client, status):
            await asyncio.to_thread(laptop, line)

        return act

    # Workers that train when each line is typed: a spare takes the place of the one that is killed.
    worlds = [4, 4, 4, 2]
    deeds = [Deed(type_later(line), 5, world) for line, world in zip(block.splitlines(), worlds, strict=True)]
    made = tmp_path / "work/out/llama3-8b"
    file = RECIPES / "llama3-8b-pretrain/tiny.toml"
    told = [RECIPES / "train.py", file, f"model.folder={made}/model", f"data.tokens={made}/tokens"]
    told += ["train.steps=400"]
    process = start(tmp_path, "--nnodes", "2:4", "--spares", 1, *told, job="llama", preload=PRELOAD)
    wait_for(process, "waiting for nodes")
    with Driver(tmp_path / "jobs/llama", deeds) as driver:
        ran = finish(process, tmp_path, "llama", timeout=400)
    calm = finish(start(tmp_path, "--nnodes", 2, *told, job="calm", preload=PRELOAD), tmp_path, "calm", 400)
    assert (ran.code, calm.code) == (0, 0), ran.output[-3000:]
    assert not driver.left
    assert ran.kinds().count("resize") == 2
    assert len(ran.report["incidents"]) == 1
    assert ran.losses() == calm.losses()
    assert ran.report["final"]["params_xxh3"] == calm.report["final"]["params_xxh3"]
