"""Replays schedules: python tests/coordinator/virtual SEED [--without CLASS ...] [--quiet]; or many: SEED SEED_AFTER_LAST."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path[0:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]


def main() -> int:
    """Exit code 1: an invariant does not hold."""
    from simcluster.checks import Violation

    from virtual.luck import CLASSES
    from virtual.run import run_seed

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("until", type=int, nargs="?", help="all seeds from the first one to before this one")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=CLASSES, help="leave these out of its luck"
    )
    parser.add_argument("--quiet", action="store_true", help="only how it ended")
    given = parser.parse_args()
    logging.disable()
    failed = 0
    for seed in range(given.seed, given.until or given.seed + 1):
        began = time.perf_counter()
        try:
            story = run_seed(seed, given.without, tells=given.until is None and not given.quiet)
        except Violation as violation:
            failed += 1
            print(str(violation) if given.until is None else str(violation).splitlines()[0])
            continue
        for line in story.lines:
            print(line)
        print(f"{time.perf_counter() - began:.2f} s: {_brief(story)}")
    return 1 if failed else 0


def _brief(story: object) -> str:
    return ", ".join(f"{k}={v}" for k, v in vars(story).items() if k != "lines")


if __name__ == "__main__":
    sys.exit(main())
