"""Hugging Face's Trainer at level 2, with one changed line:

    from holdfast.transformers import Trainer          # was: from transformers import Trainer
    SFTTrainer = holdfast.transformers.wrap(SFTTrainer)  # for a trainer that is not Trainer itself

Importing this hides torchrun's variables; a call that trains makes the process a member of its job. See docs/transformers.md for what
stays and what changes.
"""

from __future__ import annotations

from holdfast.adapters import world

world.enter()  # before transformers looks at the environment

from holdfast.adapters.accelerate import backend  # noqa: E402
from holdfast.adapters.huggingface.trainer import Trainer, wrap  # noqa: E402

backend.leave_out()

__all__ = ["Trainer", "wrap"]
