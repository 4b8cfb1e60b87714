"""Two forks of a warm process against two new processes: what differs there differs here, and what is equal there is the same here."""

import json
import os
import subprocess
import sys

import pytest

SEEDER = """
import random, numpy, torch
from random import SystemRandom
if SEEDS:
    random.seed(1); numpy.random.seed(1); torch.manual_seed(1 << 40)
else:
    random.random(); numpy.random.randn(1); torch.randn(1)  # numbers that are used up say nothing of a seed
own = {
    "random": random.Random(), "random, seeded": random.Random(1), "random, from entropy": random.Random(SystemRandom().getrandbits(64)),
    "legacy": numpy.random.RandomState(), "legacy, seeded": numpy.random.RandomState(1),
    "numpy": numpy.random.default_rng(), "numpy, of many bits": numpy.random.default_rng(1 << 127 | 1),
    "another": numpy.random.Generator(numpy.random.Philox()), "another, seeded": numpy.random.Generator(numpy.random.Philox(1)),
}
own["numpy, a child"] = own["numpy"].spawn(1)[0]
"""

DRAW = """
import importlib, json, multiprocessing, os, sys
def draw():
    import random, numpy, torch, sympy.core.random, seeder
    numbers = {name: float(x.random()) for name, x in seeder.own.items()}
    numbers["spawned later"] = float(seeder.own["numpy"].spawn(1)[0].random())
    numbers |= {
        "random's own": random.random(), "numpy's own": numpy.random.randn(), "torch's own": torch.rand(1).item(),
        "torch.Generator": torch.rand(1, generator=torch.Generator()).item(),
        "sympy's": sympy.core.random.rng.random(), "key": multiprocessing.current_process().authkey.hex(),
    }
    print(json.dumps(numbers), flush=True)
"""

NEW = DRAW + "draw()\n"

FORKED = (
    DRAW
    + """
from holdfast.agent import zygote
generators = zygote.import_modules(sys.argv[1].split(","))
for _ in range(2):
    if not (child := os.fork()):
        generators.renew()
        draw()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
)


def drawn(folder, code: str, *arguments: str) -> list[dict[str, object]]:
    env = dict(os.environ, PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    command = [sys.executable, "-c", code, *arguments]
    said = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=100).stdout
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize(
    ("preload", "seeds"),
    [
        # A module that imports torch itself, and seeds it before anybody else could look at it.
        pytest.param("seeder", True, marks=pytest.mark.long),
        pytest.param("sympy.core.random,seeder", False, marks=pytest.mark.nightly),
    ],
)
def test_a_fork_draws_what_a_new_process_draws(tmp_path, preload: str, seeds: bool) -> None:
    (tmp_path / "seeder.py").write_text(SEEDER.replace("SEEDS", str(seeds)))
    new = drawn(tmp_path, NEW)[0], drawn(tmp_path, NEW)[0]
    forks = drawn(tmp_path, FORKED, preload)
    for name, number in new[0].items():
        if number == new[1][name]:
            assert [fork[name] for fork in forks] == [number, number], name
        else:
            assert len({number, new[1][name], forks[0][name], forks[1][name]}) == 4, name
    # Else this shows nothing.
    assert (new[0]["torch's own"] == new[1]["torch's own"]) is seeds
