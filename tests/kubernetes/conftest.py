"""What the scenes on a real cluster share: `make kube-test`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The person's folder of jobs, with the operator installed in the cluster."""
    if "HOLDFAST_KUBE_DIR" not in os.environ:
        pytest.skip("there is no Kubernetes: make kube-test starts one")
    from realkube import install, reached

    async def prepare() -> None:
        async with reached() as api:
            await install(api)

    asyncio.run(prepare())
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def play(home: Path) -> Callable[[Any], None]:
    """Runs a scene, and leaves the cluster as it was."""
    from realkube import mend, reached

    def run(scene: Any) -> None:
        async def act() -> None:
            async with reached() as api:
                try:
                    await scene(api)
                finally:
                    await mend(api)

        asyncio.run(act())

    return run


@pytest.fixture(scope="session")
def undisturbed(home: Path) -> Any:
    """The losses of the same training that nothing happens to."""
    from realkube import Undisturbed

    return Undisturbed(home)
