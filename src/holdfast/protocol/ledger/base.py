"""What every event of the ledger has."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.protocol.naming import kebab


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to the job. Subclasses are frozen and take their fields by keyword.

    A field without a default is always written. One that a later version adds has a default, which older ledgers are read
    with; a default is not written.
    """

    kind: ClassVar[str]
    """The name in the ledger, from the class: `NodeJoined` is `node-joined`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = kebab(cls.__name__)
