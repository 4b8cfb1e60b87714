"""What every event of the ledger has."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.protocol.naming import kebab

LINE_WIDTH = 77
"""Characters of 100 columns that are left after `[holdfast]` and the time, for the words of a sentence. Its paths come on top."""


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to the job. Subclasses are frozen and take their fields by keyword.

    A field without a default is always written. One that a later version adds has a default, which older ledgers are read
    with; a default is not written.
    """

    kind: ClassVar[str]
    """The name in the ledger, from the class: `NodeJoined` is `node-joined`."""

    ROUTINE: ClassVar[bool] = False
    """People need not read it as it happens; `holdfast events` shows it."""

    def sentence(self) -> str:
        """One sentence for a person who has not read the code; empty if it is of no interest to one."""
        # Loud, so that an event without a sentence fails its test. A default text would reach people
        # unnoticed.
        raise NotImplementedError(type(self).__name__)

    def paths(self) -> tuple[str, ...]:
        """Paths and URLs that the sentence may have. They are never shortened: a person copies them into the next command."""
        return ()

    # The kind is derived from the class, so the two cannot differ. Renaming a class therefore changes the
    # name on disk: such a class needs its old kind, and a test with a recorded ledger fails without.
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = kebab(cls.__name__)
