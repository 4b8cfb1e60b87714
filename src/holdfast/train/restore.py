"""Where a worker's state comes from when it has none: peers, snapshot memory, a durable tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.checkpoint.located import find_in_memory
from holdfast.checkpoint.replicate import Pull
from holdfast.errors import CollectiveFailed, StateError, StateLost, TierError, UnreadError, UsageError
from holdfast.observe.transfer_progress import HowFar, Seen
from holdfast.protocol import messages as m
from holdfast.protocol.phases import Phase
from holdfast.tensors.dtensor_shards import Submesh
from holdfast.train import checkpoint_restore, reshard, state_image
from holdfast.train.constants import Constants
from holdfast.train.link import Link
from holdfast.train.peer_transfer import Fetch

if TYPE_CHECKING:
    from holdfast.train.sharding import Sharding


class StateRestorer:
    """Brings the state of a generation's start into the protected objects, as the coordinator says."""

    def __init__(
        self, link: Link, objects: state_image.Protected, sharding: Sharding | None, constants: Constants
    ) -> None:
        """sharding: of a replica of several workers."""
        self.link = link
        self._page = link.page
        self._objects = objects
        self._sharding = sharding
        self._constants = constants

    def restore(self, form: m.JoinGeneration) -> int:
        """Returns the bytes that came.

        Raises:
            CollectiveFailed: it could not be had from there; another generation tries again.
            UsageError: a durable tier has it, and it is of other objects.
            StateLost: that checkpoint is damaged.
            GenerationBroken: the generation broke meanwhile.
        """
        # Peers first: their memory has the newest state, at the network's speed. Which of the sources is
        # meant was decided by the coordinator; nothing here falls back, because all newcomers must load the
        # same step.
        if form.donors:
            # Before the state, which has the hash of these and is refused where they have another.
            nbytes = self._fetch_constants(form) if self._constants else 0
            return nbytes + self._load(form, self._fetch(form))
        if form.copy is not None:
            return self._load(form, self._from_memory(form))
        return self._from_shards(form) if form.shards else self._from_tier(form)

    def _fetch(self, form: m.JoinGeneration) -> state_image.Image:
        fetch = Fetch(form.generation, form.donors, self.link.token, self._seen(form), self._page.wait_for)
        # A transfer waits for a peer like a collective does, so it is ended in the same way.
        self.link.guard(form.generation.number, fetch.abort)
        try:
            return fetch.run(self._objects)
        except StateError as error:
            raise CollectiveFailed(str(error)) from error

    def _fetch_constants(self, form: m.JoinGeneration) -> int:
        seen = self._seen(form)
        fetch = Fetch(
            form.generation, form.donors, self.link.token, seen, self._page.wait_for, what="constant"
        )
        self.link.guard(form.generation.number, fetch.abort)
        try:
            index = fetch.index()
            if self._constants.are_those_of(index):
                return 0
            self._constants.take(fetch.fill(self._constants.targets, index))
        except StateError as error:
            raise CollectiveFailed(str(error)) from error
        return index.nbytes

    def _load(self, form: m.JoinGeneration, image: state_image.Image) -> int:
        # Before the objects are changed: if the generation is over, the next one may start from another step.
        self.link.check(form.generation.number)
        self._page.beat()
        state_image.load(self._objects, image, self._submesh)
        return image.index.nbytes

    def _from_memory(self, form: m.JoinGeneration) -> state_image.Image:
        """The snapshot, from this node's memory or another's."""
        assert form.copy is not None
        own_node = self.link.start.env.get("HOLDFAST_NODE", "")
        pull = Pull(key=form.copy.key, holders=form.holders, token=self.link.token, own_node=own_node)
        self.link.guard(form.generation.number, pull.abort)
        try:
            return checkpoint_restore.pull_image(self._objects, pull, form.copy.shard.head, self._seen(form))
        except (StateError, TierError) as error:
            raise CollectiveFailed(str(error)) from error

    def _from_shards(self, form: m.JoinGeneration) -> int:
        """The snapshot, which was taken with another number of shards."""
        own_node = self.link.start.env.get("HOLDFAST_NODE", "")
        shard_index, shard_count = self._shard_of(form)
        try:
            found = find_in_memory(
                form.shards, self.link.token, own_node=own_node, reader=shard_index, readers=shard_count
            )
            return reshard.load(self._objects, found, shard_index, self._submesh, self._seen(form))
        except (StateError, TierError) as error:
            raise CollectiveFailed(str(error)) from error

    def _shard_of(self, form: m.JoinGeneration) -> tuple[int, int]:
        """Which shard this worker holds, of how many."""
        return form.generation.members[form.rank].shard_index, form.generation.shard_count

    @property
    def _submesh(self) -> Submesh | None:
        return self._sharding.submesh if self._sharding else None

    def _from_tier(self, form: m.JoinGeneration) -> int:
        """The checkpoint, from its durable tier."""
        assert form.durable is not None
        self._page.enter(Phase.TIER)
        try:
            seen, shard = self._seen(form), self._shard_of(form)
            return checkpoint_restore.restore(
                self._objects, form.durable.url, form.durable.step, seen, shard, self._submesh
            )
        except UnreadError as error:
            # StateLost and CollectiveFailed lead to different decisions. A damaged checkpoint is damaged for
            # everybody, so the coordinator takes an older one; a tier that does not answer is tried again.
            raise StateLost(str(error)) from error
        except TierError as error:
            raise CollectiveFailed(str(error)) from error
        except StateError as error:
            # Its bytes were whole. Whoever changed the model is told so at the first attempt: the others would say the same.
            raise UsageError(
                f"the checkpoint of step {form.durable.step} in {form.durable.url} contains other objects than those "
                "that the script protects; protect the same objects as before, or use another --checkpoint and "
                f"another --job: {error}"
            ) from error

    def _seen(self, form: m.JoinGeneration) -> Seen:
        """A sign of life for all that comes in, and an end to it when the generation has ended."""
        number = form.generation.number
        restoring = HowFar(lambda nbytes, total: self.link.send(m.Restoring(number, nbytes, total)))

        def seen(nbytes: int, total: int) -> None:
            self._page.beat()
            # Called for every chunk, in the thread that reads: it ends a transfer whose generation broke, at
            # most one chunk late.
            self.link.check(number)
            if nbytes:
                restoring.add(nbytes, total)

        return seen
