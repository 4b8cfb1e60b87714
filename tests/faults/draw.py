"""Level 0, without any seed: says what each attempt of each rank draws. The second rank fails once."""

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
numbers = [np.random.randint(1 << 62), torch.randint(1 << 62, (1,)).item(), random.getrandbits(62)]
with open(sys.argv[1], "a") as told:
    told.write(" ".join(map(str, numbers)) + "\n")
dist.barrier()
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(1)
dist.barrier()
