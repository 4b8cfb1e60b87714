"""Regular expressions of rules. A user's pattern is searched for by RE2, in time linear in the length of the line
whatever the pattern: with Python's `re`, `(a+)+$` on one long line would stop the agent of each node, and the job would
lose healthy nodes."""

from __future__ import annotations

import re
from functools import cache
from typing import cast

MOST_CHARS = 4_000
"""The longest pattern of a user. Together with MEMORY_BYTES it limits the time for a line of 2,000 characters to a
tenth of a second."""
MEMORY_BYTES = 1 << 20


@cache
def compiled(pattern: str, own: bool) -> re.Pattern[str]:
    """Compiles a pattern. own: it is from Holdfast's catalogue, and may use features that RE2 lacks, such as lookahead.

    Raises:
        ValueError: it cannot be used. The message continues a sentence that begins with "the pattern".
    """
    if own:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
    try:
        import re2
    except ImportError as error:
        raise ValueError(f"needs google-re2, which is not installed here: {error}") from None
    if len(pattern) > MOST_CHARS:
        raise ValueError(f"has {len(pattern):,} characters; the limit is {MOST_CHARS:,}")
    options = re2.Options()
    options.log_errors, options.max_mem = False, MEMORY_BYTES
    try:
        return cast("re.Pattern[str]", re2.compile(pattern, options))
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
    except UnicodeEncodeError:
        why = "it is not Unicode"
    raise ValueError(
        f"is not a regular expression of RE2, which does not support look-around, back-references and (?x): {why}"
    )
