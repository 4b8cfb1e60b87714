"""The connections of one generation: the mesh for words between all, gloo for gradients between those that hold the
same shard, and, where a replica has several workers, its own groups (`switched`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # type: ignore[attr-defined, unused-ignore]

from holdfast.errors import CollectiveFailed
from holdfast.protocol.messages import Generation
from holdfast.train.mesh import Mesh, MeshListener, MeshStore
from holdfast.train.wires import Wires

if TYPE_CHECKING:
    from holdfast.train.switched import Row


class Group(Wires):
    """One generation's connections. Built in two parts, so that `abort` works while `connect` runs.

    Attributes:
        rank, size: among the workers that hold the same shard of the state, which sum their gradients.
        mesh: connects all members of the generation.
    """

    def __init__(
        self, generation: Generation, rank: int, host: str, listener: MeshListener, row: Row | None = None
    ) -> None:
        """row: the groups of this worker's replica, if it has several workers."""
        own = generation.members[rank]
        column = [m.rank for m in generation.members if m.position == own.position]
        super().__init__(column.index(rank), len(column), host)
        self.generation = generation.number
        self.mesh = Mesh(generation, rank)
        self._listener = listener
        self._own = own
        self._row = row

    def join(self, token: str) -> None:
        """Connects to every member. Raises CollectiveFailed when one is gone or the generation breaks."""
        if self.mesh.size == 1:
            return
        self.mesh.connect(self._listener, token)
        store = MeshStore(self.mesh)
        if self.size > 1:
            self.connect(PrefixStore(f"position-{self._own.position}", store))
        if self._row is not None:
            self._row.connect(lambda name: PrefixStore(f"replica-{self._own.replica}/{name}", store))
        store.finish()
        if self._aborted:
            self.abort()
            raise CollectiveFailed("the generation broke while its members connected")

    def abort(self) -> None:
        """Frees every call that waits for a peer. Safe from any thread, more than once."""
        super().abort()
        self._listener.release(self.generation)
        self.mesh.abort()
        if self._row is not None:
            self._row.abort()

    def close(self) -> None:
        """Gives everything back, after `abort` or when no member needs the group any more."""
        super().close()
        if self._row is not None:
            self._row.close()
        self.mesh.close()
        self._listener.release(self.generation)
