"""What this package is installed as: its name on PyPI is not that of the import, which is somebody else's there.

Every worker asks this at its start, so it imports nothing but what Python has loaded already.
"""

from __future__ import annotations

import os
import warnings

NAME = "holdfast-train"
"""As pip knows it; what one imports is `holdfast`."""
INSTALLED = ("site-packages", "dist-packages")


def stranger(folder: str) -> str | None:
    """What else is installed in this folder under the name of the import, for example `holdfast 1.2`. Both own the same files,
    and the one that was installed later has replaced some of the other's. None: nothing is."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return None
    found = next((n for n in names if n.startswith("holdfast-") and n.endswith(".dist-info")), None)
    return found and found.removesuffix(".dist-info").replace("-", " ")


def warn_of_stranger(file: str) -> None:
    """Warns where another distribution is installed over this one. file: `__file__` of the package.

    A warning and no error: a job that runs goes on, and a node that joins it later must be able to.
    """
    folder = os.path.dirname(os.path.dirname(file))  # noqa: PTH120
    # A checkout shares its folder with nobody.
    if folder.endswith(INSTALLED) and (other := stranger(folder)) is not None:
        warnings.warn(f"{other} is installed in {folder}, too. {way_out()}", RuntimeWarning, stacklevel=3)


def way_out() -> str:
    """What to do about it."""
    return (
        f"That is another project, whose files have the same names as those of {NAME}: pip uninstall holdfast, then "
        f"pip install --force-reinstall --no-deps {NAME}"
    )
