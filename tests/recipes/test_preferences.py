"""The recipe that learns preferences, with TRL. `make adapters-test` installs it."""

from pathlib import Path

import pytest
from test_recipes import PRELOAD, RECIPES

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_a_kill_and_a_lost_node_change_no_bit_of_the_adapters(tmp_path, recipes):
    pytest.importorskip("trl", reason="needs pip install 'holdfast-train[recipes,adapters]'")
    from harness import finish, start

    recipes.make_tiny.make("llama", tmp_path / "made", exercises=300)
    command = [RECIPES / "dpo.py", RECIPES / "llama3-8b-dpo/tiny.toml"]
    command += [f"model.folder={tmp_path}/made/model", f"data.pairs={tmp_path}/made/preferences.jsonl"]
    command += ["train.steps=8"]
    faults = ("--fault", "kill-worker:rank=1,step=3", "--fault", "kill-node:rank=0,step=6")
    ended = {}
    for job, options in (("calm", ("--nnodes", 2)), ("struck", ("--nnodes", "1:2", *faults))):
        out = ("--out", tmp_path / job, "--trainer-folder", tmp_path / f"{job}-trainer")
        process = start(tmp_path, *options, *command, *out, job=job, preload=f"{PRELOAD},trl")
        ended[job] = finish(process, tmp_path, job, timeout=200)
        assert ended[job].code == 0, ended[job].output[-3000:]
    calm, struck = ended["calm"], ended["struck"]
    assert len(struck.report["incidents"]) == 2
    assert struck.losses() == calm.losses()
    assert struck.report["final"]["params_xxh3"] == calm.report["final"]["params_xxh3"]
    adapters = [Path(tmp_path / job / "adapter_model.safetensors").read_bytes() for job in ("calm", "struck")]
    assert adapters[0] == adapters[1]
