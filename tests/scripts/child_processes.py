"""A rank that runs a helper with a port, short-lived children that it does not wait for, and a daemon of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

SERVER = """
import socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
print("serves", flush=True)
listener.accept()
listener.accept()
"""


def port() -> int:
    """The same in every start, so that a helper which is left from the one before is in the way."""
    file = Path("port")
    if not file.exists():
        with socket.create_server(("127.0.0.1", 0)) as free:
            file.write_text(str(free.getsockname()[1]))
    return int(file.read_text())


def zombies() -> list[int]:
    """Children of the agent that nobody has reaped."""
    found = []
    for task in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for pid in task.read_text().split():
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(int(pid))
    return found


dist.init_process_group("gloo")
rank, start = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 1:
    print("zombies:", zombies(), flush=True)
    helper = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"start {start}: the helper {helper.stdout.readline().strip()}", flush=True)
    shell = subprocess.Popen("sleep 300 & sleep 300; true", shell=True)
    short = [subprocess.Popen(["true"]) for _ in range(3)]
    daemon = subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
    print("daemon", daemon.pid, flush=True)
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(20):
    weight.grad = torch.ones(2)
    dist.all_reduce(weight.grad)
    optimizer.step()
dist.barrier()
