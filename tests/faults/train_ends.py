"""Saves its state and then, as it is told, ends, stands still (deaf to SIGTERM), raises, or saves as it is ended.

Every rank saves a part of its own; rank 1 is one save ahead where it is told "ahead"."""

import signal
import sys
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast as hf

last, how = int(sys.argv[1]), sys.argv[2]
writer = sys.argv[3] if len(sys.argv) > 3 else "save"
gate = sys.argv[4] if len(sys.argv) > 4 else ""
EARLIER = 4
dist.init_process_group("gloo")
rank = dist.get_rank()
factor = 1 if writer == "dcp" else rank + 1  # dcp takes a plain tensor for the same on every rank
own = torch.zeros(200_000)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"own": own, "model": model}


def save(step: int) -> None:
    if writer == "dcp":
        dcp.save({"own": own}, checkpoint_id=f"step-{step}", storage_writer=hf.checkpoint.TieredWriter())
    else:
        assert hf.checkpoint.save(state, step, overlap=writer == "overlap")


def load() -> int:
    if writer != "dcp":
        return hf.checkpoint.load(state) or 0
    reader = hf.checkpoint.TieredReader()
    try:
        dcp.load({"own": own}, storage_reader=reader)
    except BaseException as error:  # what dcp raises is no Exception
        if "no complete checkpoint" not in str(error):
            raise
        return 0
    assert reader.found is not None
    return reader.found.step


def stand() -> None:
    print(f"rank {rank} stands", flush=True)
    threading.Event().wait()


def copies_when_the_gate_opens() -> None:
    """The last copy is at work for as long as the test wants: it reads a named pipe first."""
    from holdfast.checkpoint import api

    copy = api.copy_into

    def held_up(*args: object) -> None:
        with open(f"{gate}-{rank}", "rb") as pipe:
            pipe.read()
        copy(*args)

    api.copy_into = held_up


begin = load()
print(f"rank {rank} begins at {begin}", flush=True)
if begin:
    assert own[0].item() == begin * factor, own[0]
for step in range(begin, last):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    own.fill_((step + 1) * factor)
    dist.barrier()
    if step + 1 == last and gate:
        copies_when_the_gate_opens()
    if step + 1 == last and how == "in the handler":

        def on_term(number: int, frame: object) -> None:
            save(last)
            sys.exit(0)

        signal.signal(signal.SIGTERM, on_term)
        dist.barrier()
        print(f"rank {rank} stands", flush=True)
        while True:
            signal.pause()
    if step + 1 == last or (step + 1 == EARLIER and how == "in the handler"):
        save(step + 1)
if how == "ahead" and rank == 1:
    own.fill_((last + 1) * 2)
    save(last + 1)
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how in ("ahead", "stand", "deaf"):
    dist.barrier()
    stand()
if how == "raise":
    dist.barrier()
    if rank == 1:
        raise ValueError("this rank is at fault")
    threading.Event().wait()
