"""Twenty mistakes that people make in their first hour: what they see then, whole, as they see it.

Each is `train.py` with a few words changed. `golden/NAME.plain.txt` is what `python train.py` prints, `golden/NAME.run.txt`
what `holdfast run` does. After a change of a message: `HOLDFAST_GOLDEN=write pytest tests/messages -m 'long or not long'`,
and read the difference as somebody who has made the mistake.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import end_leftovers, end_started, finish, start

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
COLUMNS = 100
LIMIT_S = 60


@dataclass(frozen=True)
class Mistake:
    """changes: in the text of the script. options: of `holdfast run`. behind: what stands behind the script. plain: `python train.py` shows it, too."""

    changes: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    plain: bool = True


def change(*pairs: str, **more) -> Mistake:
    return Mistake(tuple(zip(pairs[::2], pairs[1::2], strict=True)), **more)


PROTECT = "    run.protect(model=model, optimizer=optimizer)\n"
BACKWARD = "step.backward(loss, weight=labels.numel())"
APPLY = "            step.apply(optimizer, max_grad_norm=1.0)\n"
LOG = "        run.log("
MISTAKES = {
    "no-protect": change(PROTECT, ""),
    "no-apply": change(APPLY, ""),
    "optimizer-step": change(APPLY, f"            optimizer.step()\n{APPLY}"),
    "plain-backward": change(BACKWARD, "loss.backward()"),
    "batch-sizes": change("micro_batch=4", "micro_batch=6"),
    "mean-loss": change(', reduction="sum"', ""),
    "model-changed": change(LOG, f"        model[1].bias.data.clamp_(-0.001, 0.001)\n{LOG}"),
    "no-dataset": change(
        "TensorDataset(text[:, :-1], text[:, 1:])", 'holdfast.data.TokenDataset("corpus.npy", seq_len=32)'
    ),
    "exception": change(LOG, f'        if step.index == 7:\n            raise KeyError("lr")\n{LOG}'),
    "not-a-number": change(BACKWARD, BACKWARD.replace("loss,", "loss / (step.index != 3),")),
    "flag-behind": change(behind=("--spares", "1"), plain=False),
    # Beyond those that everybody makes.
    "no-with": change("        with step:", "        if step:"),
    "data-loader": change(
        "data = TensorDataset(", "data = torch.utils.data.DataLoader(TensorDataset(", "text[:, 1:])", "text[:, 1:]))"
    ),
    "scheduler-outside": change(
        "optimizer=optimizer)",
        "optimizer=optimizer, scheduler=scheduler)",
        PROTECT.partition("(")[0],
        f"    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n{PROTECT.partition('(')[0]}",
        LOG,
        f"        scheduler.step()\n{LOG}",
    ),
    "clipped-by-hand": change(
        APPLY,
        f"            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{APPLY}",
    ),
    "no-module": change("import holdfast\n", "import holdfast\nimport nosuchmodule\n"),
}  # fmt: skip


@pytest.fixture
def folder():
    """Its name is as long on every machine, so that lines break alike."""
    made = Path(tempfile.mkdtemp(prefix="mistake-", dir="/tmp"))
    (made / "home").mkdir()
    yield made
    end_started()
    end_leftovers(made)
    shutil.rmtree(made)


def write(mistake: Mistake, folder: Path) -> None:
    text = (HERE / "train.py").read_text()
    for old, new in mistake.changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)


SECONDS = r"\d+(?:\.\d+)? m?s\b"
SAME = (
    (r"^\[holdfast\] +(?:\d+\.\d+ s +)?", "[holdfast] "),
    (
        r"^\[holdfast\] (?:page: |nodes warming up|waiting for nodes|waiting for the last|snapshots are in).*\n",
        "",
    ),
    # Before or after what a worker says of its end: the report below has where the state is.
    (r"^\[holdfast\] (?:saving the last state|step \d+ is saved).*\n", ""),
    (r'File ".*/(holdfast|torch)/(.*)", line \d+', r'File "\1/\2", line N'),
    (r"xxh3 \w{16}", "xxh3 0123456789abcdef"),
    (r"(loss +)\d+\.\d+", r"\g<1>1.234"),
    (r"\S+ steps/s; (.* takes) \S.* \(median\)", r"10.0 steps/s; \1 10 ms (median)"),
    # The newest report of a worker may be on its way when the job fails.
    (r"^logged .*\n", ""),
    (r" broke at step \d+", " broke at step N"),
    (r"^goodput .*?(?= of )", "goodput     10.0%"),
    (SECONDS, "1 s"),
    # Their columns are as wide as the figures in them.
    (r"^(Wall time|Incidents|Where the time went)\n\n(?:.+\n)+", r"\1\n\n...\n"),
)


def like(text: str, folder: Path) -> str:
    """Without what is another one each time: times, figures, ports, numbers of processes, and tables of times."""
    text = text.replace(str(folder), "/tmp/mistake-12345678")
    for pattern, same in SAME:
        text = re.sub(pattern, same, text, flags=re.MULTILINE)
    # What the script writes and what the coordinator says come on different ways.
    lines = text.splitlines(keepends=True)
    ends = next((i for i, line in enumerate(lines) if line.startswith("job  ")), len(lines))
    live = sorted(lines[:ends], key=lambda line: not line.startswith("[holdfast]"))
    return "".join([*live, *lines[ends:]])


def compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HOLDFAST_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.fixture(scope="module")
def plain():
    """What `python train.py` prints of each of them: one process imports torch, and each script is a fork of it."""
    folders = {
        n: Path(tempfile.mkdtemp(prefix="mistake-", dir="/tmp")) for n, m in MISTAKES.items() if m.plain
    }
    for name, where in folders.items():
        write(MISTAKES[name], where)
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, HERE / "plain.py", *folders.values()], env=one_thread, check=True, timeout=LIMIT_S
    )
    yield {name: like((where / "output").read_text(), where) for name, where in folders.items()}
    for where in folders.values():
        shutil.rmtree(where)


@pytest.mark.parametrize("name", [n for n, m in MISTAKES.items() if m.plain])
def test_what_plain_python_prints(name, plain):
    compare(f"{name}.plain", plain[name])


def last_lines(text: str) -> str:
    """Of a job that failed: what happened, where, and what to do."""
    return text.partition(" the job failed ")[2].partition("\n")[2]


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_job_prints(name, folder, monkeypatch):
    mistake = MISTAKES[name]
    write(mistake, folder)
    monkeypatch.chdir(folder)
    ran = finish(start(folder / "home", *mistake.options, "train.py", *mistake.behind), folder / "home")
    compare(f"{name}.run", like(f"{ran.output}exit code {ran.code}\n", folder))
    if ran.code:
        said = last_lines(ran.output)
        assert [line for line in said.splitlines() if len(line) > COLUMNS] == []
        # Each is said once, and none is cut.
        for words in ("what happened", "where", "what to do"):
            assert len(re.findall(rf"^{words}  ", said, re.MULTILINE)) == 1
        assert "…" not in said


@pytest.mark.long
def test_a_name_that_is_used_twice(folder, monkeypatch):
    write(Mistake(), folder)
    monkeypatch.chdir(folder)
    for _ in range(2):
        ran = finish(start(folder / "home", "train.py"), folder / "home")
    compare("name-used-twice.run", like(f"{ran.output}exit code {ran.code}\n", folder))


@pytest.mark.long
def test_a_model_that_is_another_on_resume(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for mistake in (Mistake(), change("64", "32", "until=20", "until=30")):
        write(mistake, folder)
        ran = finish(start(folder / "home", "train.py"), folder / "home")
    compare("model-changed-on-resume.run", like(f"{ran.output}exit code {ran.code}\n", folder))


def holdfast(folder: Path, *args: str, prefix: tuple[str, ...] = ()) -> str:
    command = [
        *prefix,
        sys.executable,
        "-m",
        "holdfast.cli",
        "run",
        "--no-ui",
        "--job",
        "job",
        *args,
        "train.py",
    ]
    environment = os.environ | {"HOLDFAST_HOME": str(folder / "home")}
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
    )
    return like(f"{ran.stdout}exit code {ran.returncode}\n", folder)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("wrong-flag", ["--spare", "1"]),
        ("wrong-value", ["--nnodes", "two"]),
        ("wrong-fault", ["--fault", "kill-worker:stpe=3"]),
    ],
)
def test_what_the_command_line_refuses(name, args, folder):
    write(Mistake(), folder)
    compare(f"{name}.run", holdfast(folder, *args))


def test_a_script_that_is_not_there(folder):
    compare("no-script.run", holdfast(folder))


def mount(folder: Path, size: str) -> None:
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs root, to mount a file system")


def test_a_disk_without_room(folder):
    write(Mistake(), folder)
    mount(folder / "home", "64k")
    try:
        said = holdfast(folder)
    finally:
        subprocess.run(["umount", "-l", folder / "home"], check=True)
    compare("full-disk.run", said)


@pytest.mark.long
def test_a_small_dev_shm(folder):
    write(Mistake(), folder)
    mounting = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", mounting, "true"], capture_output=True).returncode:
        pytest.skip("needs root, to mount a file system")
    said = holdfast(folder, prefix=("unshare", "-m", "sh", "-c", mounting))
    # The folder that is there already: whichever node looks first may find none of its own. Its name decides where lines are
    # folded, so they are not.
    said = re.sub(r"/dev/shm/holdfast-\d+(?:/\w+(?:/job-\w+(?:/node\d)?)?)?", "/dev/shm/holdfast-0", said)
    said = re.sub(r"(?<!\n)\n {5,}(?=\S)", " ", said)
    # Two nodes are refused at about the same time.
    lines = re.sub(r"node\d", "node0", said).splitlines(keepends=True)
    compare("small-dev-shm.run", "".join(sorted(dict.fromkeys(lines[:4])) + lines[4:]))
