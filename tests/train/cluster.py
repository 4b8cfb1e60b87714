"""Groups of real workers as threads of one process: each has its own mesh and its own gloo."""

from concurrent.futures import ThreadPoolExecutor

from holdfast.protocol.messages import Generation, Member
from holdfast.train.control_channel import ChannelListener
from holdfast.train.generation_group import Group

TOKEN = "secret"


class Cluster:
    def __init__(self, size: int) -> None:
        self.size = size
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

    def group(self, generation: Generation, rank: int) -> Group:
        return Group(generation, rank, "127.0.0.1", self.listeners[rank])

    def join(self, number: int) -> list[Group]:
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
