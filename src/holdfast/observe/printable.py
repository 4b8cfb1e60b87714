"""Makes the output of workers, and names that they choose, safe for a terminal: text, colours and carriage returns
pass, but nothing that moves the cursor, clears the screen, writes a title or the clipboard, or reverses the direction
of a line."""

from __future__ import annotations

import codecs
import re

_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
# Of C0 all but tab, newline and carriage return; C1; the marks of the Unicode bidirectional algorithm (UAX
# #9), and the two Unicode line separators, which programs do not treat as ends of lines.
_SHOWN = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
_PLAIN = re.compile(_SHOWN)
_COLOURED = re.compile(f"({_COLOUR})|{_SHOWN}")
_COLOURS = re.compile(_COLOUR)
_BEGUN = re.compile(r"\x1b(?:\[[0-9;:]{0,40})?\Z")
"""The beginning of a colour sequence whose end may still come."""


def printable(text: str, colours: bool = False) -> str:
    """The text with an escape such as `\\x1b` in place of each character that could control a terminal. colours:
    sequences for colours are kept."""
    return (_COLOURED if colours else _PLAIN).sub(_escape, text)


def uncoloured(text: str) -> str:
    """As `printable`, but without the escape sequences of colours: for output in which they would be read as text."""
    return printable(_COLOURS.sub("", text))


def _escape(found: re.Match[str]) -> str:
    if found.re is _COLOURED and found[1]:
        return found[1]
    return found[0].encode("unicode_escape").decode()


class PrintableStream:
    """As `printable`, for a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""

    def feed(self, data: bytes) -> str:
        """The text that can be shown now. An incomplete character or colour sequence is held back until its end
        arrives."""
        text = self._rest + self._decoder.decode(data)
        begun = _BEGUN.search(text)
        cut = begun.start() if begun else len(text)
        self._rest = text[cut:]
        return printable(text[:cut], colours=True)
