"""Figures as people read them."""

import pytest

from holdfast.protocol import units


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0 ms"),
        (0.0042, "4.2 ms"),
        (0.0143, "14 ms"),
        (0.0999, "0.10 s"),
        (0.2049, "0.20 s"),
        (9.999, "10.0 s"),
        (59.96, "60.0 s"),
        (185, "3 min 05 s"),
        (7300, "2 h 01 min"),
    ],
)
def test_seconds(value, shown):
    assert units.seconds(value) == shown


def test_unknown_is_a_dash_and_zero_is_zero():
    for show in (units.seconds, units.count, units.share, units.loss, units.text):
        assert show(None) == "–"
    assert units.rate(None) == "– steps/s"
    assert units.count(0) == "0"
    assert units.share(0.0) == "0.0%"


def test_ranks_as_ranges():
    assert units.ranks([]) == "–"
    assert units.ranks([3, 0, 1, 2, 7]) == "0-3,7"


def test_clip_keeps_the_width():
    assert units.clip("a  b\nc", 10) == "a b c"
    assert units.clip("abcdef", 4) == "abc…"
    assert units.clip_path("/a/b/c.log", 6) == "…c.log"
    assert units.clip_words("see /a/b  and\nmore words", 12, ("/a/b", "")) == "see /a/b and mo…"
    assert units.clip_words("too many words see /a/b/c.log now", 9, ("/a/b/c.log",)) == "too many…/a/b/c.log…"
    assert units.clip_words("see s3://b/ckpt (1.00)", 99, ("s3://b/ckpt",)) == "see s3://b/ckpt (1.00)"


def test_clock():
    assert units.clock(35.9) == "0:35"
    assert units.clock(3723) == "1:02:03"


@pytest.mark.parametrize(("value", "said"), [(57_048_551, "57.05 M"), (812_345, "812.3 k"), (99.6, "100")])
def test_amounts(value, said):
    assert units.amount(value) == said
