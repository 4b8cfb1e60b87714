"""Regular expressions of rules. A user's is searched for by RE2, in time that grows with the line and not with what the pattern
makes of it: `(a+)+$` on one long line would otherwise stop the agent of each node, and the job would lose healthy nodes."""

from __future__ import annotations

import re
from functools import cache
from typing import cast

MOST_CHARS = 4_000
"""Of a user's pattern. With MEMORY_BYTES: what bounds the time for a line of 2,000 characters to a tenth of a second."""
MEMORY_BYTES = 1 << 20


@cache
def compiled(pattern: str, own: bool) -> re.Pattern[str]:
    """own: it is of Holdfast's catalogue, and may need what RE2 does not have, as a look ahead.

    Raises:
        ValueError: it cannot be used. The message goes on after "the pattern".
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
