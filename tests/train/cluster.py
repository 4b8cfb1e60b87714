"""Groups of real workers as threads of one process: each has its own mesh and its own gloo."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from holdfast.protocol.messages import Generation, Member
from holdfast.train.control_channel import ChannelListener
from holdfast.train.generation_group import GenerationGroup
from holdfast.train.place import WorkShare, share, shares
from holdfast.train.replica import Replica

TOKEN = "secret"


class Cluster:
    def __init__(self, size: int, fan_out: int | None = None) -> None:
        """fan_out: of a tree; None: a mesh."""
        self.size, self.fan_out = size, fan_out
        self.listeners = [ChannelListener("127.0.0.1", TOKEN, f"w{rank}") for rank in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def generation(self, number: int, ranks=None) -> Generation:
        ranks = range(self.size) if ranks is None else ranks
        return Generation(
            number=number,
            members=tuple(
                Member(
                    rank=i,
                    worker=f"w{r}",
                    node=f"n{r}",
                    slot=0,
                    host="127.0.0.1",
                    vote_port=self.listeners[r].port,
                )
                for i, r in enumerate(ranks)
            ),
        )

    def group(self, generation: Generation, rank: int) -> GenerationGroup:
        return GenerationGroup(generation, rank, "127.0.0.1", self.listeners[rank], fan_out=self.fan_out)

    def join(self, number: int) -> list[GenerationGroup]:
        generation = self.generation(number)
        groups = [self.group(generation, rank) for rank in range(self.size)]
        list(self.pool.map(lambda g: g.join(TOKEN), groups))
        return groups

    def each(self, work, groups):
        return list(self.pool.map(work, groups))

    def close(self):
        for listener in self.listeners:
            listener.close()
        self.pool.shutdown()


def compute(step, computing, one):
    """Calls `one` with each of this worker's micro-batches of the step. computing: a lock; torch's generator is the process's,
    so that one thread at a time may draw from it."""
    taken = iter(step)
    while True:
        with computing:
            if (batch := next(taken, None)) is None:
                return
            one(batch)


def nothing(*_):
    pass


class Worker(Replica):
    """A replica without a coordinator, and without a state but its model and optimizer."""

    def __init__(self, model, optimizer, kind, micro_batches):
        self.model, self.micro_batches = model, micro_batches
        self.optimizer = optimizer
        self.gradients = kind(dict.fromkeys(model.parameters()), lambda: None)
        self.norms, self.without = [], []
        self.checks_local, self.sharding, self.device = False, None, torch.device("cpu")
        self.state = SimpleNamespace(
            used=SimpleNamespace(check=lambda **_: None),
            guard=SimpleNamespace(before_update=nothing),
            buffer_rules=SimpleNamespace(after_micro=nothing, reduce=nothing),
            updating=lambda *_: nullcontext(),
        )

    def join(self, group):
        count, rank, world = self.micro_batches, group.rank, group.size
        self._group = group
        self.place = SimpleNamespace(
            generation=group.generation,
            shard_count=1,
            weighs=True,
            share=lambda: WorkShare(
                micro_batches=share(count, rank, world), rank=rank, world=world, idle=0, leaves=count
            ),
            message_counts=lambda: [len(mine) for mine in shares(count, world)],
        )

    def begin_step(self):
        self.gradients.begin()

    def vote(self, step):
        there = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(torch.cat([grad.flatten() for grad in there]).norm().item())
        self.without.append([name for name, p in self.model.named_parameters() if p.grad is None])

    enter = check = hand_over = begin_update = end_update = staticmethod(nothing)

    def take_state_of(self, other):
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
