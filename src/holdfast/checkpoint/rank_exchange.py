"""What the ranks of a process group tell each other about checkpoints: a few bytes, over the group's store."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.errors import TierError
from holdfast.protocol.wire.decoding import decode

# Made once, and not by whoever reads first: msgspec 0.22 crashes where two threads are the first to decode a type.
_lists = msgspec.msgpack.Decoder(list[bytes])
_values = msgspec.msgpack.Decoder()


class RankExchange:
    """Words to all ranks, each about something that has a name of its own. Blocks until they are there.

    A store's client serves one call at a time, also one that waits: a thread that speaks needs a `RankExchange` of its own,
    or two threads of two ranks can wait for each other for ever.
    """

    def __init__(self, name: str, rank: int, world: int, store: Any = None) -> None:
        """store: a torch.distributed.Store of all ranks; needed when there are several. `name` is the same on all."""
        self.rank, self.world = rank, world
        if world > 1:
            # A connection of its own: see the class. The store that the process group uses must never be
            # blocked by a rank that waits here.
            self._store = store.clone()
            # Every rank adds 1, so the ranks of one session see `world` consecutive numbers, and the division
            # gives all of them the same one. A later session in the same store gets other keys, and cannot
            # read answers of this one.
            session = (self._store.add(f"holdfast/{name}", 1) - 1) // world
            self._name = f"holdfast/{name}/{session}"

    @property
    def share(self) -> tuple[int, int]:
        """This rank, and how many there are that tell each other; a rank that hears no other one is alone."""
        return (self.rank, self.world) if self.world > 1 else (0, 1)

    def gather(self, about: str, value: Any) -> list[Any]:
        """What every rank says, in the order of the ranks. Plain values.

        Raises:
            TierError: a rank did not say it within the store's time-out.
        """
        if self.world == 1:
            return [value]
        mine = msgspec.msgpack.encode(value)
        name = f"{self._name}/{about}"
        try:
            if self.rank:
                self._store.set(f"{name}/{self.rank}", mine)
                # Rank 0 collects and publishes one list, so every rank decides on the same bytes. If each
                # collected by itself, one could time out where another did not, and they would go different
                # ways.
                together = self._store.get(f"{name}/all")
            else:
                others = [f"{name}/{rank}" for rank in range(1, self.world)]
                together = msgspec.msgpack.encode([mine, *(self._store.get(n) for n in others)])
                self._answer(f"{name}/all", together)
                for other in others:
                    # Keys are deleted by their reader, or a run that saves for weeks would fill the store.
                    # The answer stays: how many have read it is not known.
                    self._store.delete_key(other)
        except RuntimeError as error:
            raise TierError(
                f"rank {self.rank}: the other ranks did not answer: {_first_line(error)}"
            ) from error
        what = f"{self._name}/{about}: the data that the ranks exchanged is damaged"
        parts: list[bytes] = decode(_lists.decode, together, what, error=TierError)
        return [decode(_values.decode, part, what, error=TierError) for part in parts]

    def from_first(self, about: str, value: Any, patience_s: float | None = None) -> Any:
        """What rank 0 says; the values of the others do not matter.

        Args:
            patience_s: for rank 0 to say it; None: the store's time-out.

        Raises:
            TierError: it did not say it in time.
        """
        if self.world == 1:
            return value
        name = f"{self._name}/{about}"
        try:
            if self.rank:
                if patience_s is not None:
                    self._store.wait([name], timedelta(seconds=patience_s))
                return decode(
                    _values.decode,
                    self._store.get(name),
                    f"{name}: the data from rank 0 is damaged",
                    error=TierError,
                )
            self._answer(name, msgspec.msgpack.encode(value))
        except RuntimeError as error:
            raise TierError(f"rank {self.rank}: rank 0 did not answer: {_first_line(error)}") from error
        return value

    def forget(self, about: str) -> None:
        """What was said about it goes. Who asks for it later waits as for what was never said."""
        with suppress(RuntimeError):  # the store is gone, and all that was in it
            self._store.delete_key(f"{self._name}/{about}")

    def _answer(self, name: str, data: bytes) -> None:
        """Rank 0 may hold the store, and end as soon as this returns: the others must be able to have it by then."""
        self._store.set(name, data)
        self._store.get(name)


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0]
