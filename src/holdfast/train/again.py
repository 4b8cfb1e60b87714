"""Computing a micro-batch once more, so that training does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from holdfast.train.held_state import HeldState


@contextmanager
def put_aside(state: HeldState, device: torch.device) -> Iterator[None]:
    """Generators and buffers are afterwards what they were before. Inside, the buffers that have a rule are what the last
    commit left, as at the begin of any micro-batch."""
    # What the script draws after its loop must not depend on whether this worker computed one more micro-batch.
    generators = (random.getstate(), np.random.get_state(), torch.default_generator.get_state())
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    buffers = [(buffer, buffer.detach().clone()) for buffer in state.module_buffers()]
    state.buffer_rules.put_back()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.default_generator.set_state(generators[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
