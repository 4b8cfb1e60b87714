"""What a terminal is sent of what others wrote."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from holdfast.observe.printable import PrintableStream, printable
from holdfast.observe.tables import PrintableConsole

HOSTILE = {
    "title": ("\x1b]0;gone\x07", r"\x1b]0;gone\x07"),
    "clipboard": ("\x1b]52;c;cm0gLXJm\x1b\\", r"\x1b]52;c;cm0gLXJm\x1b" + "\\"),
    "clear": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "up": ("\x1b[1A\x1b[K", r"\x1b[1A\x1b[K"),
    "eight bits": ("\x9b2J\x9d0;x\x9c", r"\x9b2J\x9d0;x\x9c"),
    "back": ("rm\x08\x08ls", r"rm\x08\x08ls"),
    "another direction": ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
    "a line that is none": ("a\u2028b", r"a\u2028b"),
    "NUL": ("a\0b", r"a\x00b"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("colours", [False, True])
def test_what_controls_a_terminal_is_shown(name, colours):
    given_text, shown = HOSTILE[name]
    assert printable(given_text, colours) == shown


def test_colours_tabs_and_progress_bars_stay_where_they_are_wanted():
    bar = "\r 50%|\u2588\u2588  |\t\x1b[32mok\x1b[0m\x1b[38;2;1;2;3m!\n"
    assert printable(bar, colours=True) == bar
    assert printable("\x1b[31mred") == r"\x1b[31mred"


@given(st.binary(max_size=60), st.lists(st.integers(1, 7), max_size=20))
def test_pieces_make_no_difference_and_nothing_gets_through(data, sizes):
    whole, pieces = PrintableStream(), PrintableStream()
    expected = whole.feed(data)
    found, at = "", 0
    for size in [*sizes, len(data)]:
        found += pieces.feed(data[at : at + size])
        at += size
    assert found == expected
    assert printable(found, colours=True) == found


def test_a_console_controls_the_terminal_and_its_content_does_not():
    out = io.StringIO()
    console = PrintableConsole(file=out, force_terminal=True, width=60)
    console.print(Text("name\x1b]0;gone\x07", style="red"))
    console.show_cursor(False)
    assert "\x1b]0;" not in out.getvalue()
    assert r"name\x1b]0;gone" in out.getvalue()
    assert "\x1b[?25l" in out.getvalue()
