"""One sample kills whoever computes it: the job ends after three tries, and says at which step and that no machine is at fault."""

import re

import pytest
from harness import TINY, run

from holdfast.checkpoint.archive import Archive

DEADLY_STEP = 12
DIES = """        if {sample} in list(map(int, ids)):
            os.kill(os.getpid(), 9)
        return torch.randn"""


@pytest.mark.long
def test_a_batch_that_kills_whoever_computes_it_is_told_from_bad_machines(tmp_path):
    script = tmp_path / "train.py"
    text = TINY.read_text()
    # A batch of data is a function of its numbers, so the sample is known by a number that the step begins with.
    seen = "        rng = torch.Generator()"
    assert seen in text
    order = "        with open(ORDER, 'a') as file: file.write(f'{int(ids[0])}\\n')\n"
    script.write_text(
        text.replace(seen, order + seen).replace(
            "WIDTH = 64", f"WIDTH = 64\nORDER = {str(tmp_path / 'order')!r}"
        )
    )
    alone = run(tmp_path, "--nnodes", 1, script, DEADLY_STEP + 1, job="alone")
    assert alone.code == 0, alone.output[-3000:]
    sample = int((tmp_path / "order").read_text().split()[-1])  # of the last step's last micro-batch
    script.write_text(text.replace("        return torch.randn", DIES.format(sample=sample)))
    ran = run(tmp_path, "--nnodes", 3, "--spares", 1, script, 60)
    assert ran.code == 1, ran.output[-3000:]
    told = re.fullmatch(
        rf"step {DEADLY_STEP} ended a worker in 3 attempts, on (\S+)(?:, (\S+))? and (\S+), which have only the script and "
        "the samples of that step in common",
        ran.report["reason"],
    )
    assert told, ran.report["reason"]
    assert "one worker computes all samples" in " ".join(ran.output.split())
    assert ran.report["steps"]["committed"] == DEADLY_STEP
    assert Archive(str(ran.job_dir / "checkpoint")).steps()[-1] == DEADLY_STEP
