"""Files of a job as commands read them: what is damaged is named, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import UsageError

T = TypeVar("T")


def read_stored(path: Path, decoder: msgspec.json.Decoder[T], advice: str) -> T:
    """Reads a JSON file.

    Args:
        decoder: made once, where a module is imported: several threads may read at a time.
        advice: what a person can do if it is damaged; ends the message.

    Raises:
        FileNotFoundError: it is not there.
        UsageError: it cannot be read, or has something else.
    """
    try:
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged ({error}): {advice}") from None


def read_stored_text(path: Path, advice: str) -> str:
    """Reads a file of one short text, as `read_stored`."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is damaged (it is no text): {advice}") from None
