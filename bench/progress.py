"""A line on stderr now and then, so that long work is never silent for more than two seconds."""

from __future__ import annotations

import sys
import time

SILENCE_S = 2.0
REPEAT_S = 15.0


class Progress:
    """Prints what is being waited for: a new text after two seconds of silence, the same one rarely."""

    def __init__(self) -> None:
        self._text = ""
        self._printed_at = self._started_at = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._printed_at < (SILENCE_S if text != self._text else REPEAT_S):
            return
        print(f"[{now - self._started_at:5.0f} s] {text}", file=sys.stderr, flush=True)
        self._text, self._printed_at = text, now
