"""Whose state is wrong, by checksums alone."""

import random

import pytest

from holdfast.health.checksums import DifferingReplicas, apart


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([], None),
        ([7], None),
        ([7, 7, 7], None),
        ([7, 8], DifferingReplicas(("w0", "w1"), proven=False)),
        ([7, 8, 7], DifferingReplicas(("w1",), proven=True)),
        ([7, 8, 9], DifferingReplicas(("w0", "w1", "w2"), proven=False)),
        ([7, 7, 8, 8], DifferingReplicas(("w0", "w1", "w2", "w3"), proven=False)),
        ([7, 7, 8, 8, 7], DifferingReplicas(("w2", "w3"), proven=True)),
        ([7, 7, 8, 9], DifferingReplicas(("w0", "w1", "w2", "w3"), proven=False)),
    ],
)
def test_a_majority_of_two_at_least_tells_who_is_wrong(sums, expected):
    assert apart({f"w{i}": value for i, value in enumerate(sums)}) == expected


def test_nobody_who_is_right_is_ever_proven_wrong():
    """Random schedules: fewer than half hold other bits, which they need not share."""
    for seed in range(2000):
        rng = random.Random(seed)
        size = rng.randint(1, 9)
        wrong = set(rng.sample(range(size), rng.randint(0, (size - 1) // 2)))
        sums = {f"w{i}": rng.randint(1, 3) if i in wrong else 0 for i in range(size)}
        found = apart(sums)
        if not wrong:
            assert found is None, seed
        elif size - len(wrong) >= 2:
            assert found == DifferingReplicas(tuple(f"w{i}" for i in sorted(wrong)), proven=True), seed
