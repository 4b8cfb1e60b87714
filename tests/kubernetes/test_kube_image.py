"""What the image of deploy/kubernetes/Containerfile installs."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
LOCK = (FOLDER / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_lock_has_a_permitted_version_of_all_that_the_image_needs() -> None:
    """Nothing else looks: the image installs without looking for dependencies."""
    fixed = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", LOCK, re.M)
    }
    assert len(fixed) == len([line for line in LOCK.splitlines() if not line.startswith("#")])
    made_of = re.search(r"'\.\[([a-z,]+)\]'", LOCK)
    assert made_of is not None, "the lock says of which extras it is made"
    wanted = [*PROJECT["dependencies"]]
    for extra in made_of[1].split(","):
        wanted += PROJECT["optional-dependencies"][extra]
    for one in map(Requirement, wanted):
        if one.name == "torch":
            continue
        assert fixed[canonicalize_name(one.name)] in one.specifier, one


def test_its_pytorch_is_the_one_of_make_setup() -> None:
    (version,) = re.findall(r"torch==(\S+)$", (FOLDER / "Containerfile").read_text(), re.M)
    assert f"torch=={version}\n" in (ROOT / "Makefile").read_text()
    assert f"torch=={version} " in LOCK, "the lock is made beside another one"
