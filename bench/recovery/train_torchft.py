"""One torchft replica group of one process, after torchft's own `train_ddp.py`.

torchrun would host the store of the group; a group of one process hosts it itself.
"""

from __future__ import annotations

import argparse
import logging
from datetime import timedelta

from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from bench.recovery import model as job
from bench.recovery.events import NOT_PARTICIPATING, CommitLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings

MANAGER_TIMEOUT = timedelta(seconds=30)
"""As in torchft's example."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--gloo-timeout-s", type=float, default=5.0, help="that of torchft's example")
    parser.add_argument("--spare", action="store_true", help="one group more than take part in the gradient")
    return parser.parse_args()


def main() -> None:
    settings, chosen = Settings.from_environment(), options()
    logging.basicConfig(level=logging.WARNING)
    job.prepare_process()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    network, ballast = job.build(), job.Ballast(settings.state_mb)
    inner = job.build_optimizer(network.parameters())

    def state_dict() -> dict[str, object]:
        return {"model": network.state_dict(), "optim": inner.state_dict(), "ballast": ballast.state_dict()}

    def load_state_dict(state: dict) -> None:
        network.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])
        ballast.load_state_dict(state["ballast"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=chosen.gloo_timeout_s)),
        # With a spare this is the fixed number of groups that take part; otherwise the least that may go on.
        min_replica_size=settings.replicas if chosen.spare else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if chosen.spare else WorldSizeMode.DYNAMIC,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"bench_{chosen.group}",
        timeout=MANAGER_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, inner)
    samples = job.Samples()
    gate, log = Gate(settings.gate), CommitLog(settings.events)

    while True:
        step = manager.current_step()
        held_s = gate.wait(step, chosen.group)
        inputs, labels = samples.batch(job.share(step, chosen.group, settings.replicas))
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if manager.current_step() > step:
            log.commit(
                rank=chosen.group if manager.is_participating() else NOT_PARTICIPATING,
                step=manager.current_step() - 1,
                world=manager.num_participants(),
                gen=manager._quorum_id,
                held_s=held_s,
            )


if __name__ == "__main__":
    main()
