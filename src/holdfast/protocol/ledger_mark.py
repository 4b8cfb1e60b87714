"""How far a copy of a coordinator's ledger goes."""

from __future__ import annotations

from typing import NamedTuple


class LedgerMark(NamedTuple):
    """How far a ledger has come. Of two, the greater one is newer: a later term began with all that it knew of earlier ones."""

    term: int = 0
    page: int = 0
    """Number of its newest page, from 1 and over all terms; 0: it has none."""
