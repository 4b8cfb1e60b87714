"""The node's snapshot memory: slots for its workers, copies for and from other nodes, writing to durable tiers.

Whatever takes long (checksums, transfers, writes) runs in a few threads; the agent's loop only starts it and reports to the
coordinator how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import damaged, parts_of
from holdfast.checkpoint.memory import PooledSlot, SlotPool, default_budget
from holdfast.checkpoint.policy import Retention
from holdfast.checkpoint.replicate import Pull, replicate
from holdfast.checkpoint.snapshot_server import SnapshotServer
from holdfast.errors import HoldfastError, MemoryShort, SlotsTaken, StateError, TierError
from holdfast.observe.transfer_progress import HowFar
from holdfast.protocol import messages as m
from holdfast.protocol.machine.processes import stand_back
from holdfast.protocol.snapshots import Copy, DurableTier, Key, Lack, Shard
from holdfast.tensors.index import decode_index

_log = logging.getLogger(__name__)
THREADS = 3
MODEST_NICE = 10
"""For the node's own workers, for copies from other nodes, and for durable tiers: so many each. A tier that does not
answer must not hold up a snapshot."""

LEAVE_S = 3.0
"""For a write to a durable tier to end when the job is over."""

TURN_S = 10.0
"""For the snapshots before to become complete: a worker waits for the slot of one that the other ranks keep as well."""

LOOK_EVERY_S = 600.0
"""So often the agent reads what lies in its memory."""

LOOK_BYTES = 16 << 20
"""Read at once: in between the slot may be used again."""

T = TypeVar("T")


class SnapshotKeeper:
    """Owns the node's slots, the server that serves them to other nodes, and the threads that work on them."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        host: str,
        token: str,
        send: Callable[[m.AgentMessage], None],
    ) -> None:
        """Adopts what an agent before it left in `folder`. Blocks for as long as summing that up takes.

        Raises:
            TierError: there can be no snapshot memory here.
        """
        self._send, self._token = send, token
        # Every start of a job has a new token. Slots that an earlier start left are told apart by it.
        run = xxhash.xxh3_64_intdigest(token.encode())
        self.pool = SlotPool(folder, budget_bytes, run)
        if not budget_bytes:
            self.pool.budget_bytes = default_budget(folder, self.pool.nbytes)
        # Last of what may fail: a server that was left running could not be ended by anybody.
        self._server = SnapshotServer(self.pool, host, token)
        # Three pools and not one. A tier that does not answer holds its threads for minutes, and a worker
        # that waits for its slot must not wait for that.
        self._own, self._copying, self._storing = (
            ThreadPoolExecutor(
                THREADS,
                thread_name_prefix=f"holdfast-{what}",
                initializer=stand_back,
                initargs=(MODEST_NICE,),
            )
            for what in ("snapshot", "replicate", "store")
        )
        self._closing = threading.Event()
        self._filling: dict[str, tuple[Key, PooledSlot, float]] = {}
        self._begun: dict[str, asyncio.Event] = {}
        self._summing: dict[Key, str] = {}
        self._asked: dict[str, Key] = {}
        self._pulls: set[Pull] = set()
        self._prepared: set[tuple[int, int]] = set()
        self._sizes: dict[int, int] = {}
        self._archives: dict[str, Archive] = {}
        self._stores = 0
        self._paced = False
        self._freed = asyncio.Event()

    @property
    def port(self) -> int:
        """Where the slots are served."""
        return self._server.port

    @property
    def server(self) -> str:
        """The name by which `protocol.network.proof` knows whoever serves them."""
        return self._server.name

    def copies(self) -> tuple[Copy, ...]:
        """The shards that are held here."""
        return tuple(_copy_of(s) for s in self.pool.held())

    async def close(self, gives_back: bool = True) -> None:
        """Ends what is under way: the job is over. gives_back: the memory too; else it is left as a killed agent leaves it,
        for the next start."""
        self._closing.set()
        # First the sockets: a thread that waits for another node's bytes ends only when its connection does.
        for pull in list(self._pulls):
            pull.abort()
        await asyncio.to_thread(self._server.close)
        for threads in (self._own, self._copying):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        # Without waiting, because a thread may hang in a write to a tier. The process ends by os._exit, which
        # asks no thread.
        self._storing.shutdown(wait=False, cancel_futures=True)
        await self._leave_tiers()
        # Without the coordinator's word the memory stays. It may hold the only copy of the newest state, and
        # the job's next start adopts it.
        if gives_back:
            self.pool.close()
        else:
            self.pool.leave()

    async def _leave_tiers(self) -> None:
        """Waits for what is being written, but not for a tier that does not answer: the process ends without its thread."""
        try:
            async with asyncio.timeout(LEAVE_S):
                while self._stores:
                    await self._freed.wait()
        except TimeoutError:
            _log.warning(
                "a durable tier does not answer; the agent ends without waiting for it",
                extra={"stores": self._stores},
            )

    # ------------------------------------------------------------ this node's workers

    def expect(self, message: m.SnapshotExpected) -> None:
        """Prepares memory for a shard of this size, which a worker will save, while training goes on."""
        self._prepare(message.rank, message.nbytes)

    def _prepare(self, rank: int, nbytes: int) -> None:
        """A shard's size is known: the slots for its next snapshots are brought in before somebody waits for them."""
        if (rank, nbytes) in self._prepared or self._closing.is_set():
            return
        # Once for each shard and size: bringing the pages of a large slot in takes seconds of a processor.
        self._prepared.add((rank, nbytes))
        self._sizes[rank] = nbytes

        def ended() -> bool:
            # What was expected of a shard may turn out to be wrong. Going on with that size would take memory
            # from the right one.
            return self._closing.is_set() or self._sizes[rank] != nbytes

        self._copying.submit(self.pool.prepare, rank, nbytes, ended)

    async def slot_wanted(self, worker: str, message: m.SlotWanted) -> m.SlotGiven:
        """A slot for a worker's copy, its pages present."""
        self.gone(worker)  # it gave up what it had begun
        # Before the first await. Whatever becomes of this worker in between can then see which copy it was
        # at.
        self._paced = message.paced
        self._asked[worker] = message.key
        self._begun[worker] = asyncio.Event()
        try:
            slot = await self._begin(message)
        except TierError as error:
            self._copied(worker, message.key)
            lack = _lack(error)
            paced = message.paced and lack is Lack.SLOT
            self._send(m.SnapshotRejected(message.key, str(error), lack, paced))
            return m.SlotGiven(message.key, None, str(error), paced)
        if self._asked.get(worker) != message.key:
            self.pool.drop(slot)  # the worker ended meanwhile
            self._send(m.SnapshotRejected(message.key, "the worker ended before it got a memory slot"))
            return m.SlotGiven(message.key, None, "taken back")
        self._filling[worker] = (message.key, slot, time.monotonic())
        self._prepare(message.key.rank, message.nbytes)
        return m.SlotGiven(message.key, str(slot.path))

    async def _begin(self, message: m.SlotWanted) -> PooledSlot:
        """A slot; a worker that waits for one has it when older snapshots are complete, or have reached their tiers."""
        last_s = time.monotonic() + TURN_S
        while True:
            # Taken before the attempt. If a store ends between the refusal and the wait, this very event is
            # set, and nothing is missed.
            freed = self._freed
            try:
                return await self._run(self._own, self.pool.begin, message.key, message.nbytes)
            except TierError as error:
                comes = self._stores or freed.is_set()
                left_s = last_s - time.monotonic()
                soon = isinstance(error, SlotsTaken) and left_s > 0
                if not message.waits or not (comes or soon):
                    raise
                _log.info("a snapshot waits for room in memory", extra={"step": message.key.step})
            with suppress(TimeoutError):
                async with asyncio.timeout(None if comes else left_s):
                    await freed.wait()

    def complete(self, step: int, kept: int | None) -> None:
        """Notes that a snapshot is complete, which may make room for workers that wait for a slot."""
        self.pool.snapshot_complete(step, kept)
        self._has_freed()

    def forget(self, above_step: int, until: int | None) -> None:
        """See `SlotPool.forget`; there may be room for those who wait."""
        self.pool.forget(above_step, until)
        self._has_freed()

    def _has_freed(self) -> None:
        """Whoever waits for room looks again."""
        # A new event each time: whoever waits holds the old one, and nobody can miss the change in between.
        self._freed.set()
        self._freed = asyncio.Event()

    async def slot_filled(self, worker: str, message: m.SlotFilled) -> None:
        """Notes that a worker's copy is complete: it counts from now on, even if the worker is lost."""
        key, slot, began_s = self._filling.get(worker, (None, None, 0.0))
        if slot is None or key != message.key:
            return
        # From here on the worker's end changes nothing: the bytes are in this node's memory, and only the
        # checksum is missing.
        del self._filling[worker]
        self._copied(worker, key)
        self._summing[key] = worker
        try:
            if message.index is None:
                raise TierError("the worker abandoned the snapshot")
            # The index is a worker's message. It is checked before any of its offsets are used.
            index = decode_index(message.index)
            await self._run(self._own, self.pool.seal, slot, index)
        except Exception as error:  # noqa: BLE001 - whatever it is, the coordinator waits for an answer
            self.pool.drop(slot)
            self._send(m.SnapshotRejected(message.key, str(error)))
            return
        finally:
            # After the seal: the hello of a reconnection lists the shard either here or among the copies, and
            # never in neither.
            self._summing.pop(key, None)
        self._send(m.SnapshotStored(_copy_of(slot), message.stall_s, time.monotonic() - began_s))

    def summing(self, worker: str | None = None) -> tuple[Key, ...]:
        """Shards that a worker (None: any) has left complete here; SnapshotStored or SnapshotRejected follows."""
        return tuple(key for key, whose in self._summing.items() if worker in (None, whose))

    async def copied(self, worker: str) -> None:
        """Waits until the copy that a worker is making is complete or given up."""
        if (begun := self._begun.get(worker)) is not None:
            await begun.wait()

    def _copied(self, worker: str, key: Key) -> None:
        """Nothing more comes of this copy from the worker."""
        if self._asked.get(worker) == key and (begun := self._begun.pop(worker, None)) is not None:
            begun.set()

    def gone(self, worker: str) -> None:
        """Drops the unfinished copy of a worker that ended."""
        if (key := self._asked.get(worker)) is not None:
            self._copied(worker, key)
        self._asked.pop(worker, None)
        key, slot, _ = self._filling.pop(worker, (None, None, 0.0))
        if slot is not None and key is not None:
            self.pool.drop(slot)
            self._send(m.SnapshotRejected(key, "the worker ended before it had copied its state"))

    # ------------------------------------------------------------ the coordinator's wishes

    async def replicate(self, order: m.Replicate) -> None:
        """Fetches a copy of another node's shard and keeps it."""
        key, part = order.copy.key, order.copy.shard.head
        # Compared by the checksum of the head too: a step that was computed again after a fault has the same
        # number and may have other bytes.
        have = next((c for c in self.copies() if c.key == key and c.shard.head.xxh3 == part.xxh3), None)
        if have is not None:  # asked again, by a coordinator that may not have heard the answer
            self._send(m.SnapshotStored(have))
            return
        # The order was repeated. The transfer that is running gives the answer.
        if any(p.key == key for p in self._pulls):
            return
        pull = Pull(key=key, holders=order.holders, token=self._token)
        self._pulls.add(pull)
        began_s = time.monotonic()
        try:
            slot = await self._run(self._copying, replicate, self.pool, pull, part)
        except Exception as error:  # noqa: BLE001 - whatever it is, the coordinator waits for an answer
            _log.info(
                "a shard was not copied from another node: %s",
                error,
                extra={"step": key.step, "rank": key.rank},
            )
            # Where scripts save as often as they like, copies come as often.
            lack = _lack(error)
            self._send(m.SnapshotRejected(key, str(error), lack, self._paced and lack is Lack.SLOT))
        else:
            self._send(m.SnapshotStored(_copy_of(slot), 0.0, time.monotonic() - began_s))
            self._prepare(key.rank, slot.blob_bytes)
        finally:
            self._pulls.discard(pull)

    def store(self, order: m.StoreShard) -> Coroutine[None, None, None]:
        """Writes a shard to a durable tier. Its slot is held from this call on, so that it cannot be reused before."""
        held = ExitStack()
        try:
            # In the same turn of the loop as the order. A slot that is only marked when the thread begins
            # could be given to the next snapshot before that.
            slot = held.enter_context(self.pool.reading(order.key))
        except HoldfastError as error:
            return self._answer(m.Stored(tier=order.tier, key=order.key, shard=None, reason=str(error)))
        return self._store_held(order, slot, held)

    async def _answer(self, message: m.AgentMessage) -> None:
        self._send(message)

    async def _store_held(self, order: m.StoreShard, slot: PooledSlot, held: ExitStack) -> None:
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        with self._counted(), held:
            try:
                shard = await self._run(self._storing, self._store, order, slot, loop)
            except Exception as error:  # noqa: BLE001 - whatever it is, the coordinator waits for an answer
                _log.info(
                    "a shard was not stored: %s",
                    error,
                    extra={"step": order.key.step, "rank": order.key.rank, "tier": order.tier},
                )
                self._send(m.Stored(tier=order.tier, key=order.key, shard=None, reason=str(error)))
            else:
                self._send(
                    m.Stored(
                        tier=order.tier,
                        key=order.key,
                        shard=shard,
                        reason="",
                        took_s=time.monotonic() - began_s,
                    )
                )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """While a shard is being stored; then whoever waits for room looks again."""
        self._stores += 1
        try:
            yield
        finally:
            self._stores -= 1
            self._has_freed()

    def _store(self, order: m.StoreShard, slot: PooledSlot, loop: asyncio.AbstractEventLoop) -> Shard:
        archive, key = self._archive(order.tier), order.key

        def say(nbytes: int, total: int) -> None:
            # The link belongs to the loop's thread.
            loop.call_soon_threadsafe(self._send, m.StoreProgress(order.tier, key, nbytes, total))

        far = HowFar(say)
        # Another node has the same blob in the tier already (replicas hold the same parameters), so only this
        # rank's head is written.
        if order.blob:
            return archive.save_head(parts_of(key.step, key.rank, slot.sealed, order.blob), slot.head)
        return archive.save_shard(
            key.step,
            key.rank,
            slot.sealed,
            self._until_closed(slot),
            lambda nbytes: far.add(nbytes, slot.blob_bytes),
        )

    def _until_closed(self, slot: PooledSlot) -> Iterator[memoryview]:
        for piece in slot.buffers():
            if self._closing.is_set():
                # The manifest is written last, so a shard that ends here is no part of any checkpoint.
                raise TierError("the job ended before all of it was written")
            yield piece

    async def publish(self, order: m.Publish) -> None:
        """Writes the manifest of a checkpoint, which makes it exist, and removes checkpoints that need not be kept."""
        tier = order.tier
        error: str | None = None
        try:
            archive = self._archive(tier.url)
            # The commit writes the manifest. Only then older checkpoints may go: a crash in between leaves
            # one too many and never one too few.
            await self._run(self._storing, archive.commit, order.step, order.shards)
            await self._run(self._storing, self._prune, archive, tier, order.step)
        except Exception as trouble:  # noqa: BLE001 - whatever it is, the coordinator waits for an answer
            error = str(trouble)
        _log.info("%s", error or "published a checkpoint", extra={"step": order.step, "tier": tier.url})
        self._send(m.Published(tier.url, order.step, error))

    def _prune(self, archive: Archive, tier: DurableTier, step: int) -> None:
        """What need not be kept goes; that it cannot takes nothing from the checkpoint that exists now."""
        try:
            archive.prune(Retention(tier.keep, tier.keep_every), spare=step)
        except HoldfastError as error:
            _log.warning(
                "the step is saved, but older checkpoints could not be removed: %s",
                error,
                extra={"step": step, "tier": tier.url},
            )

    def _archive(self, url: str) -> Archive:
        if url not in self._archives:
            self._archives[url] = Archive(url)
        return self._archives[url]

    # ------------------------------------------------------------ what lies there

    async def watch(self) -> None:
        """Reads the held shards again and again, until cancelled, to find corrupted ones."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look_through()

    async def look_through(self) -> None:
        """Reads every sealed slot while there is nothing else to do. A corrupted shard does not count any more: the coordinator
        has it copied anew from another holder."""
        for key in [slot.key for slot in self.pool.held()]:
            # Reading competes with training for the bandwidth of the memory, so it gives way to anything
            # else.
            if self._filling or self._pulls or self._stores or self._closing.is_set():
                return
            try:
                bad = await self._run(self._copying, self._first_damage, key)
                if bad is not None:
                    with self.pool.reading(key) as slot:
                        self.pool.drop(slot)
                    _log.info("a snapshot changed in memory", extra={"step": key.step, "rank": key.rank})
                    self._send(m.SnapshotCorrupt(key, f"bytes {bad[0]} to {bad[1]} changed in memory"))
            except StateError:
                continue  # replaced by a newer one meanwhile

    def _first_damage(self, key: Key) -> tuple[int, int] | None:
        low = 0
        while not self._closing.is_set():
            with self.pool.reading(key) as slot:
                if low >= slot.blob_bytes:
                    return None
                with slot.blob as blob, blob[low : low + LOOK_BYTES] as piece:
                    bad = next(damaged(piece, low, slot.sums), None)
            if bad is not None:
                return bad
            low += LOOK_BYTES
        return None

    async def _run(self, threads: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)


def _lack(error: Exception) -> Lack | None:
    """Whether a shard may find room here later, or none at all."""
    if isinstance(error, SlotsTaken):
        return Lack.SLOT
    return Lack.MEMORY if isinstance(error, MemoryShort) else None


def _copy_of(slot: PooledSlot) -> Copy:
    key = slot.key
    return Copy(key, parts_of(key.step, key.rank, slot.sealed))
