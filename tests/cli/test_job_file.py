"""Options of `holdfast run` in a file."""

from pathlib import Path

import pytest
import yaml

KUBERNETES = {
    "engine": "kubernetes",
    "image": "me/train:1",
    "job": "llm",
    "script": "train.py",
    "dry-run": True,
}


def write(**values: object) -> Path:
    path = Path("job.yaml")
    path.write_text(yaml.safe_dump({key.replace("_", "-"): value for key, value in values.items()}))
    return path


def made(holdfast, *args: object, **values: object) -> dict:
    """The object that the file's options make; the command starts nothing."""
    said = holdfast("run", "-f", write(**{**KUBERNETES, **values}), *args)
    assert said.code == 0, said.err
    return next(one for one in yaml.safe_load_all(said.out) if one["kind"] == "HoldfastJob")


def test_options_by_their_names(holdfast):
    job = made(
        holdfast,
        nnodes="2:4",
        spares=1,
        nproc_per_node=8,
        checkpoint=["s3://a/b,every=10m", "s3://c/d"],
        args=["--lr", 0.5],
    )
    spec = job["spec"]
    assert (spec["nodes"], spec["minNodes"], spec["spares"], spec["procsPerNode"]) == (4, 2, 1, 8)
    assert [one["url"] for one in spec["checkpoints"]] == ["s3://a/b", "s3://c/d"]
    assert spec["run"]["args"] == ["--lr", "0.5"]
    assert spec["run"]["script"] == "train.py"


def test_the_command_line_holds_before_the_file(holdfast):
    Path("other.py").write_text("")
    job = made(holdfast, "--nnodes", 3, "other.py", "--lr", "1", nnodes=2, args=["--lr", 0.5])
    assert job["spec"]["nodes"] == 3
    assert job["spec"]["run"]["script"] == "other.py"
    assert job["spec"]["run"]["args"] == ["--lr", "1"]


def test_the_scripts_own_f_is_the_scripts(holdfast):
    said = holdfast("run", "--nnodes", "0", "train.py", "-f", "nowhere.yaml")
    assert "--nnodes '0'" in said.err


def test_a_flag_that_is_false_is_as_good_as_none(holdfast):
    assert "waitForSpare" not in made(holdfast, wait_for_spare=False)["spec"]
    assert made(holdfast, wait_for_spare=True, spares=1)["spec"]["waitForSpare"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nnode: 4", "'nnode' is not an option of `holdfast run`; did you mean 'nnodes'?"),
        ("spare: 4", "did you mean 'spares'?"),
        ("nnodes: {min: 2}", "nnodes must be a string or a number (got {'min': 2})"),
        ("nnodes: yes", "nnodes must be a string or a number (got True)"),
        ("wait-for-spare: 1", "wait-for-spare must be true or false (got 1)"),
        ("fault: {a: b}", "fault must be a list, a string or a number (got {'a': 'b'})"),
        ("file: other.yaml", "'file' is not an option"),
        ("- nnodes", "must contain a mapping of names to values"),
        ("a: [", "not valid YAML"),
        ("spares: -1", "--spares must be at least 0 (got -1)"),
        ("engine: cloud", "--engine must be local"),
    ],
)
def test_what_is_wrong_in_it_is_named(holdfast, home, text: str, words: str):
    Path("job.yaml").write_text(text)
    said = holdfast("run", "-f", "job.yaml", "train.py")
    assert said.code == 2
    assert words in said.err
    assert not home.exists()


def test_a_file_that_is_not_there(holdfast):
    said = holdfast("run", "-f", "nowhere.yaml", "train.py")
    assert (said.code, said.err) == (2, "holdfast: -f nowhere.yaml: No such file or directory\n")
