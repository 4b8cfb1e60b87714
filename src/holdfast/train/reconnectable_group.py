"""Process groups inside a replica whose connections can be exchanged under the wrappers that use them.

FSDP2, tensor parallelism and `DeviceMesh` keep the process groups with which they were made for ever. These groups are
shells: torch.distributed makes them before anybody is connected, and every generation gives them new connections. So
after a fault neither a wrapper nor a compiled graph has to be made again.

Torch has one default process group. Here it is the replica: its rank is the worker's shard index.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined, unused-ignore]

from holdfast.errors import CollectiveFault, UsageError
from holdfast.train.gloo_group import BufferPool, GlooGroup, ended, first_line

Say = Callable[[dict[str, int], int], None]
"""Tells the coordinator what was begun here, and at which agreement this worker stands; -1: it does not stand."""


class CollectiveCounts:
    """How many calls this worker has begun in each group, and where it has to stop.

    A healthy replica must not leave a collective half done, or its connections could not be used again. Workers that call the
    same collectives in one order could all stop at one number. The stages of a pipeline do not: each has its own calls, in its
    own order. So every group has a count, and every direction between two workers has one for messages. A common stopping point
    is one at which all members of each group have begun the same number of its calls.

    The coordinator takes the largest count of each group as its limit. A worker goes on until it has reached all of its limits.
    Before that it may come to a call beyond the limit of another group. That call is then begun and reported: its group's limit
    grows, and workers that had stopped go on. Counts only grow, and the step is finite, so in the end all workers have stopped.
    Only then do they leave, because until then a limit may still grow.
    """

    def __init__(self, is_mine: Callable[[str], bool]) -> None:
        """is_mine: whether this worker takes part in the calls of a name."""
        self._is_mine = is_mine
        self.say: Say = lambda begun, stands: None
        self._news = threading.Condition()
        self._begun: dict[str, int] = {}
        self._aborted = self._halting = self._leave = False
        self._limits: Mapping[str, int] | None = None
        self._agreement = 0
        self._stood = -1

    @property
    def aborted(self) -> bool:
        """Whether nobody may begin a call any more."""
        return self._aborted

    def renew(self) -> None:
        """Resets all counts, for new connections."""
        with self._news:
            self._aborted = False
            self._begun.clear()
            self._forget()

    def abort(self) -> None:
        """Frees every thread that waits in `begin`. Safe from any thread, more than once."""
        # The flag comes before the connections are shut: a call that is about to begin checks it under the same
        # lock, so none begins behind the abort and waits for a peer that has left.
        with self._news:
            self._aborted = True
            self._news.notify_all()

    def halt(self) -> dict[str, int]:
        """The generation broke, and this replica is intact: no further call begins before `run_to`. Returns what has begun.
        From the link's thread."""
        with self._news:
            # Read under the lock that `begin` holds when it adds to it. So what goes to the coordinator is
            # exact: a call that is not in it has not begun, and will not begin before `run_to`.
            self._forget()
            self._halting = True
            self._news.notify_all()
            return dict(self._begun)

    def run_to(self, limits: Mapping[str, int], agreement: int, leave: bool) -> None:
        """Sets the number of calls of each group after which this worker stops. leave: all workers have stopped. Called from
        the link's thread."""
        with self._news:
            # Messages keep their order, so a later agreement is never followed by an earlier one.
            self._limits, self._agreement, self._leave = limits, agreement, leave
            self._news.notify_all()

    def begin(self, name: str) -> None:
        """Before every call that reaches another worker.

        Raises:
            CollectiveFault: the step is to be left here.
        """
        told: dict[str, int] | None = None
        with self._news:
            while self._halting and not self._aborted:
                if self._limits is not None:
                    if self._begun.get(name, 0) < self._limits.get(name, 0):
                        break
                    if self._is_behind():
                        # Others wait inside a call of another group for this worker, and its way there leads
                        # through this one. Whoever takes part in this one hears of it and follows.
                        told = {**self._begun, name: self._begun.get(name, 0) + 1}
                        break
                    self._stand()
                # The wait has no time limit of its own: either `run_to` comes, or the coordinator aborts the
                # replica because one of its workers did not answer.
                self._news.wait()
            if self._aborted:
                raise CollectiveFault("the generation broke")
            self._begun[name] = self._begun.get(name, 0) + 1
        if told is not None:
            self.say(told, -1)

    def leave(self, broken: bool) -> int:
        """The main thread has left the step. Returns the number of the agreement at which it did, 0 where none was needed, or
        -1: the connections are of no use any more. broken: the generation is, so `halt` or `abort` was called or is about
        to be."""
        with self._news:
            # The main thread may be here before the link's thread has called `halt`. Deciding now would see
            # neither a limit nor an abort, and the replica would keep groups of which the others think
            # otherwise.
            while broken and not self._aborted and not self._may_leave():
                self._news.wait()
            # Behind its limits this worker has left the step early, by an error of its own. The others wait in
            # a call that never comes: their connections cannot be kept.
            if self._aborted or (self._limits is not None and self._is_behind()):
                return -1
            agreement = self._agreement
            self._forget()
            return agreement

    def _may_leave(self) -> bool:
        if not self._halting or self._limits is None:
            return False
        if self._is_behind() or self._leave:
            return True
        if self._stood != self._agreement:
            self._stood = self._agreement
            self.say(dict(self._begun), self._agreement)
        return False

    def _stand(self) -> None:
        """In front of a call that is not to begin.

        Raises:
            CollectiveFault: all stand, so all leave.
        """
        if self._may_leave():
            raise CollectiveFault("the generation broke")

    def _is_behind(self) -> bool:
        """Whether others have begun calls that this worker has not. Under the lock."""
        assert self._limits is not None
        return any(
            count > self._begun.get(name, 0) for name, count in self._limits.items() if self._is_mine(name)
        )

    def _forget(self) -> None:
        self._halting = self._leave = False
        self._limits, self._agreement, self._stood = None, 0, -1


_Work: Any = dist.Work


# ---------------------------------------------------------------- sent messages


class MessageWork(_Work):  # type: ignore[misc]
    """The Work that torch gets for a message. `abort` ends a wait for it, which would not end a wait for gloo's own."""

    def __init__(self, gloo: GlooGroup, work: Any, tensors: Any, called: Any) -> None:
        """tensors: gloo reads or writes them until the message is done. called: as in `ReplicaGroups`."""
        super().__init__()
        self.gloo = gloo
        self._work, self._tensors, self._called = work, tensors, called
        self._ended = False
        self._error: str | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the message has been received or sent.

        Raises:
            CollectiveFault: a peer is gone, or `abort` was called.
        """
        self._called(True)
        if not self.gloo.until(self.is_completed):
            raise CollectiveFault("the generation broke")
        if self._error is not None:
            raise CollectiveFault(self._error)
        self._called(False)
        return True

    def is_completed(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._ended

    def follow(self) -> None:
        """Waits for gloo, in the thread of its direction."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = first_line(error)
        self._ended = True
        self.gloo.tell()


class SentMessages:
    """Those of this worker that may still be on their way.

    Messages between two workers, such as those between the stages of a pipeline, are begun at once and waited for later: a schedule
    sends an activation and wants a gradient back in one go, and whoever waited for its send first would wait for a peer that does the
    same. Gloo's wait for a message cannot be left and taken up again: when its time is over it closes all connections of the group. So
    a thread for each direction waits without a limit, and the main thread waits for the thread, or for an abort.
    """

    def __init__(self) -> None:
        self._open: list[MessageWork] = []
        self._followers: dict[str, queue.SimpleQueue[MessageWork | None]] = {}

    def add(self, direction: str, message: MessageWork) -> MessageWork:
        """One more. Those of one direction come to their end in the order in which they were begun."""
        # The list keeps tensors alive: a schedule that a fault cuts off drops its own references, and gloo may
        # still write into them.
        self._open = [m for m in self._open if not m.is_completed()]
        self._open.append(message)
        if direction not in self._followers:
            self._followers[direction] = queue.SimpleQueue()
            follow = threading.Thread(
                target=_follow, args=(self._followers[direction],), name="holdfast-message", daemon=True
            )
            follow.start()
        self._followers[direction].put(message)
        return message

    def complete(self) -> bool:
        """Waits until all messages are done, which means that both ends of each have begun it. False: a peer is gone, or
        `abort` was called."""
        try:
            for message in self._open:
                message.wait()
        except CollectiveFault:
            return False
        self._open.clear()
        return True

    def close(self) -> None:
        """After an abort, or when all are complete: until gloo has let go of the tensors, if it ever does."""
        for message in self._open:
            message.gloo.let_go(message.is_completed)
        self._open.clear()
        # A thread that waits for gloo hears of its end afterwards. Where gloo never lets go it stays, and holds
        # nothing but its message.
        for follower in self._followers.values():
            follower.put(None)
        self._followers.clear()


def _follow(messages: queue.SimpleQueue[MessageWork | None]) -> None:
    while (message := messages.get()) is not None:
        message.follow()


BACKEND = "holdfast"

StoreOf = Callable[[str], Any]
"""The store through which a group, named, finds its members."""


class ReplicaGroups:
    """All process groups of one replica, on one of its workers.

    Attributes:
        pool: memory for its collectives.
        counts: how many of them have begun, and where a broken step is left.
        messages: those between two workers that may be on their way.
        stages: number of pipeline stages of the replica, whose workers send each other messages.
    """

    def __init__(
        self,
        shard_index: int,
        size: int,
        host: str,
        called: Callable[[bool], None],
        device: torch.device | None = None,
        stages: int = 1,
    ) -> None:
        """called: told whenever a collective begins (True) or has ended. device: where the tensors are."""
        self.shard_index, self.size = shard_index, size
        self.device = device
        self.host = host
        self.called = called
        self.pool = BufferPool()
        self.stages = stages
        self.counts = CollectiveCounts(self._takes_part)
        self.messages = SentMessages()
        self._groups: list[ReconnectableGroup] = []
        self.connected_in = 0
        self.beside = False

    def open(self) -> None:
        """Makes torch's default process group a shell of these groups.

        Raises:
            UsageError: the script has made one.
        """
        if dist.is_initialized():
            raise UsageError(
                "run.mesh() was called after torch.distributed.init_process_group(): remove that call, because "
                "Holdfast makes the process groups of a replica and reconnects them after a fault"
            )
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        # The backend's factory is called by torch with a rank, a size and a name, and with nothing of ours. A
        # process is in one replica, so a global is what connects the two. It must be set before torch makes
        # the default group on the next line.
        _replica[:] = [self]
        # A HashStore has no server: nobody is reached here. Torch only needs a store so as to accept the
        # group; the members find each other later, through the control channel.
        dist.init_process_group(BACKEND, store=HashStore(), rank=self.shard_index, world_size=self.size)

    def shut(self) -> None:
        """Removes the groups from torch, because `main` is about to be run again."""
        self.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._groups.clear()

    def add(self, rank: int, size: int, name: str) -> ReconnectableGroup:
        """Adds a group that torch asked for."""
        group = ReconnectableGroup(self, rank, size, name)
        self._groups.append(group)
        return group

    def renew(self, beside: bool) -> None:
        """The connections are of no use to the next generation: it makes new ones, or none where this worker is beside the
        replicas. Before anybody may call `halt` or `abort` for that generation."""
        self.close()
        # The flags are cleared here and not in `connect`. Between the two the link's thread may already be
        # given this generation's `halt` and `abort`, and a flag that it sets must not be wiped out by the
        # main thread.
        self.beside = beside
        self.counts.renew()

    def connect(self, store_of: StoreOf, generation: int) -> None:
        """Connects every group of more than one worker; all workers of the replica have them in the same order.

        Raises:
            CollectiveFault: one is gone, or `abort` was called.
        """
        for group in self._groups:
            if group.size() > 1:
                # The group is assigned before `aborted` is read, and `abort` sets the flag before it walks
                # over the groups. So whichever comes first, either this thread sees the flag or `abort` sees
                # the group. In any other order a break at this moment leaves `connect` waiting for a lost
                # peer.
                group.gloo = GlooGroup(group.rank(), group.size(), self.host, self.device)
                if self.aborted:
                    raise CollectiveFault("the generation broke while its members connected")
                group.gloo.connect(store_of(group.label))
        # Only a replica whose groups are all connected may be kept over a break, see `leave`.
        self.connected_in = generation

    @property
    def aborted(self) -> bool:
        """Whether the groups were aborted since they were connected."""
        return self.counts.aborted

    def abort(self) -> None:
        """Frees every call that waits for a worker of the replica. Safe from any thread, more than once."""
        # First the flag, then the connections: see `CollectiveCounts.abort`.
        self.counts.abort()
        for group in self._groups:
            if group.size() > 1 and group.gloo is not None:
                group.gloo.abort()

    def close(self) -> None:
        """Gives the connections back, after `abort` or when nobody needs them any more."""
        self.messages.close()
        for group in self._groups:
            if group.size() > 1 and group.gloo is not None:
                group.gloo.close()
                group.gloo = None
        self.connected_in = 0

    # ------------------------------------------------------------ leaving a step together

    def halt(self) -> dict[str, int]:
        """As `CollectiveCounts.halt`."""
        return self.counts.halt()

    def run_to(self, limits: Mapping[str, int], agreement: int, leave: bool) -> None:
        """As `CollectiveCounts.run_to`."""
        self.counts.run_to(limits, agreement, leave)

    def leave(self, broken: bool) -> int:
        """As `CollectiveCounts.leave`. What stays connected has nothing on its way."""
        agreement = self.counts.leave(broken)
        # Where all stand, both ends of every message have begun it: it comes to its end, unless a worker of the
        # replica is lost right now. Then the connections hold half of one.
        if agreement >= 0 and self.connected_in > 0 and self.messages.complete():
            return agreement
        self.abort()
        self.close()
        return -1

    def _takes_part(self, name: str) -> bool:
        """Whether calls of this name are also this worker's, see `ReconnectableGroup._name_of`."""
        label, _, ends = name.partition(BETWEEN)
        ranks = [group.rank() for group in self._groups if group.label == label]
        return bool(ranks) and (not ends or str(ranks[0]) in ends.split(">"))


BETWEEN = "|"
"""Between a group's label and the two ranks, for messages."""

_replica: list[ReplicaGroups] = []
"""Whose groups torch makes: this process is in one replica."""


def _create(common: Any, options: Any) -> ReconnectableGroup:
    """What torch calls for every new group."""
    return _replica[0].add(common.group_rank, common.group_size, common.group_id)


_ProcessGroup: Any = dist.ProcessGroup


class ReconnectableGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose connections come with the generation and go with it.

    A collective returns when it is done (with NCCL: when it is queued before all that follows): with gloo nothing is gained
    by waiting later, and only here is a wait ended by an abort. A group of one worker has its own connection to itself for ever.
    """

    def __init__(self, groups: ReplicaGroups, rank: int, size: int, name: str) -> None:
        # Everything that torch asks of a group at construction is answered without a peer, because FSDP2 and
        # `DeviceMesh` build theirs while the model is built, long before the first generation.
        super().__init__(rank, size)
        self._replica_groups, self._rank, self._size = groups, rank, size
        self.label = name
        self.gloo: GlooGroup | None = None
        if size == 1:
            self.gloo = GlooGroup(0, 1, groups.host)
            self.gloo.connect(HashStore())

    def _run(self, name: str, *args: Any, **options: Any) -> Any:
        if self._size == 1 and name in BY_ITSELF:
            # A dimension of one worker is common: `replicate` always is one. Such a collective must not count
            # as one of the replica's either, or `halt` would compare numbers that differ between layouts.
            return self._run_beside(name, *args)  # gloo would copy it, of a GPU to host memory and back
        if name in BETWEEN_TWO and self._replica_groups.stages == 1:
            raise UsageError(
                f"{name}: two workers of a replica can send messages to each other only as stages of a pipeline, and "
                "this replica has no stages: pass their number to run.mesh(stage=...)"
            )
        gloo = self.gloo
        if gloo is None:
            if self._replica_groups.beside:
                return self._run_beside(name, *args)
            if self._replica_groups.aborted:
                raise CollectiveFault("the generation broke")
            raise UsageError(
                f"{name} was called before the first step, but the workers of a replica are connected only when "
                "run.steps() begins. Build the model without communication: with the same seed on every worker, and "
                "distribute_tensor and parallelize_module with src_data_rank=None"
            )
        # Counted before anything can fail, and once for each call that reaches the other workers. All members
        # of a group make the same calls of it in the same order, which is what makes its counts comparable.
        counted = self._name_of(name, *args)
        if self._size > 1:
            self._replica_groups.counts.begin(counted)
        if name in BETWEEN_TWO:
            work = gloo.start(lambda gloo: getattr(gloo, name)(*args, **options))
            message = MessageWork(gloo, work, args[0], self._replica_groups.called)
            return self._replica_groups.messages.add(counted, message)
        self._replica_groups.called(True)
        work = self._ran_better(gloo, name, *args)
        if work is None:
            work = gloo.start(lambda gloo: getattr(gloo, name)(*args, **options))
            try:
                gloo.wait(work)
            except CollectiveFault:
                # Gloo may write into the tensor as long as it holds it. FSDP2 gives its memory back as soon
                # as this call raises, so the wait for gloo has to come before the error.
                gloo.drain(work)
                raise
        self._replica_groups.called(False)
        return work

    def _name_of(self, name: str, *args: Any) -> str:
        """Under which a call is counted: for messages each direction between two workers has a count of its own."""
        if name not in BETWEEN_TWO:
            return self.label
        ends = (self._rank, args[1]) if name == "send" else (args[1], self._rank)
        return f"{self.label}{BETWEEN}{ends[0]}>{ends[1]}"

    def _ran_better(self, gloo: GlooGroup, name: str, *args: Any) -> Any:
        """FSDP2's two collectives where gloo's own are slow. None: as gloo has it. All members decide alike: by what is called
        and with what."""
        # Each member decides by the name, the dtype and the layout, which are the same on all of them. A
        # decision by anything local, such as an address or the load, would pair a broadcast here with an
        # all-gather there.
        if name not in ("_allgather_base", "_reduce_scatter_base") or self._size == 1:
            return None
        out, mine = args[:2]
        if out.device.type != "cpu" or out.dtype != mine.dtype:
            return None
        if not (out.is_contiguous() and mine.is_contiguous()):
            return None
        if name == "_allgather_base":
            gloo.gather(out, mine)
        elif out.is_floating_point() and len(args) > 2 and args[2].reduceOp == dist.ReduceOp.SUM:
            gloo.scatter_sum(out, mine, self._replica_groups.pool)
        else:
            return None
        return ended()

    def _run_beside(self, name: str, *args: Any) -> Any:
        """What a collective leaves here without anybody else: all that there is to do in a group of one. Where this worker's
        replica is not intact, work of the script's own between two steps so comes to its end, and means nothing."""
        if name == "_allgather_base":
            args[0].view(self._size, -1).copy_(args[1].reshape(1, -1))
        elif name == "_reduce_scatter_base":
            args[0].copy_(args[1].view(self._size, -1)[self._rank].view_as(args[0]))
        elif name not in BY_ITSELF:
            raise UsageError(
                f"{name}: the replica of this worker is not complete (run.world.replica is -1): skip the call on "
                "this worker"
            )
        return ended()

    def _run_each(self, name: str, outputs: list[Any], inputs: list[Any], options: Any) -> Any:
        return [self._run(name, out, into, options) for out, into in zip(outputs, inputs, strict=True)][-1]

    # Names as torch.distributed has them; those of the collectives follow below.

    def getBackendName(self) -> str:
        """As `dist.get_backend` shows it."""
        return BACKEND

    def rank(self) -> int:
        """This worker's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Workers in the group."""
        return self._size

    @property
    def group_name(self) -> str:
        """What functional collectives find the group by."""
        return self.label

    def _set_group_name(self, name: str) -> None:
        self.label = name


BY_ITSELF = {
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "barrier",
    "_allgather_base",
    "_reduce_scatter_base",
}
"""Collectives for which a worker needs nobody else, see `_run_beside`."""


BETWEEN_TWO = {"send", "recv"}
"""Messages: only two workers take part, and neither waits for the other when it begins one."""


SAME = [
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "barrier",
    "allgather",
    "allgather_coalesced",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "send",
    "recv",
]
OTHERWISE = {
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
}
ONE_BY_ONE = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Torch's names for collectives, the newer and the older ones, and gloo's."""


def _forward() -> None:
    for name, of_gloo in {**{name: name for name in SAME}, **OTHERWISE}.items():
        setattr(ReconnectableGroup, name, partialmethod(ReconnectableGroup._run, of_gloo))
    for name, of_gloo in ONE_BY_ONE.items():
        setattr(ReconnectableGroup, name, partialmethod(ReconnectableGroup._run_each, of_gloo))


_forward()
