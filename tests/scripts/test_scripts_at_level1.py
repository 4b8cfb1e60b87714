"""Scripts with the lines of level 1, undisturbed and with faults: every line that they print is one of plain torchrun's."""

import level1
import pytest
from test_real_scripts import LONG_S, Seen, by_holdfast, by_torchrun, place

pytestmark = pytest.mark.timeout(5 * LONG_S)
NIGHTLY, LONG = pytest.mark.nightly, pytest.mark.long


def again(disturbed: Seen, expected: Seen) -> None:
    """The attempts together printed all of the expected lines and no other, began once, and ended where these end."""
    assert disturbed.code == 0
    assert set(disturbed.lines) == set(expected.lines)
    for rank, lines in expected.lines.items():
        found = disturbed.lines[rank]
        assert set(found) == set(lines)
        assert found.count(lines[0]) == 1, "the second attempt began anew"
        assert found[-1] == lines[-1]
        first = [found.index(line) for line in lines]
        assert first == sorted(first)


@pytest.mark.parametrize(
    ("script", "args", "changes", "killed"),
    [
        pytest.param("character_model.py", (), level1.CHARACTER_MODEL, (1, 11), marks=NIGHTLY),
        pytest.param("image_classifier.py", (), level1.IMAGE_CLASSIFIER, (0, 6), marks=NIGHTLY),
        pytest.param(
            "snapshot_trainer.py", ("6", "snapshot.pt"), level1.SNAPSHOT_TRAINER, (1, 14), marks=NIGHTLY
        ),
        # Its optimizer has no moments yet when a restart loads them.
        pytest.param("sharded_model.py", ("dcp",), level1.SHARDED_MODEL, (1, 7), marks=LONG),
    ],
)
def test_level_1_prints_what_torchrun_prints(tmp_path, monkeypatch, script, args, changes, killed) -> None:
    expected = by_torchrun(place(tmp_path / "torchrun"), script, *args)
    for name, faults in {
        "undisturbed": [],
        "disturbed": ["kill-worker:rank={},step={}".format(*killed)],
    }.items():
        folder = place(tmp_path / name)
        level1.change(folder / script, changes)
        chosen = ("--snapshot-every", 1)
        found = by_holdfast(
            folder, tmp_path / f"{name}-home", monkeypatch, script, *args, faults=faults, options=chosen
        )
        if faults:
            again(found, expected)
        else:
            assert (found.code, found.lines) == (0, expected.lines)
