"""Reads a configuration beside itself, writes to relative paths, logs, and has something to do at exit."""

import argparse
import atexit
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from configured_model import build

log = logging.getLogger("train")


def main() -> int:
    parser = argparse.ArgumentParser(prog="configured")
    parser.add_argument("--config", default="config.json")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    config = json.loads((Path(__file__).parent / args.config).read_text())
    config |= {name: json.loads(value) for name, value in (pair.split("=") for pair in args.set)}
    rank = int(os.environ["RANK"])
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=f"[{rank}] %(levelname)s %(message)s")
    atexit.register(lambda: Path(f"exit-{rank}.txt").write_text("at exit\n"))
    dist.init_process_group("gloo")
    log.info("config %s, name %s, argv %s", sorted(config.items()), __name__, sys.argv[1:])
    log.info("local rank %s of %s", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(config["seed"])
    model = torch.nn.parallel.DistributedDataParallel(build(config["width"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for step in range(config["steps"]):
        x = torch.full((2, config["width"]), float(step + rank))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("step %d loss %.9f", step, loss.item())
    Path(f"losses-{rank}.txt").write_text(f"{loss.item():.9f}\n")
    (Path(__file__).parent / f"beside-{rank}.txt").write_text("beside\n")
    dist.destroy_process_group()
    return config.get("code", 0)


if __name__ == "__main__":
    sys.exit(main())
