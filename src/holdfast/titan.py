"""torchtitan at level 2, with one changed word:

    holdfast run --nnodes 4 --spares 1 -m holdfast.titan --module llama3 --config llama3_debugmodel
                                       # was: torchrun ... -m torchtitan.train --module llama3 --config llama3_debugmodel

See docs/torchtitan.md for what stays, what changes and what is refused.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger, logger

from holdfast.adapters.torchtitan.trainer import as_holdfast, main
from holdfast.errors import UsageError
from holdfast.train.worker import attachment


class Manager(ConfigManager):  # type: ignore[misc] # it has no types here
    """torchtitan's command line, with the options of a job beside its own."""

    def _load_config(self, args: list[str]) -> tuple[Any, list[str]]:
        config, rest = super()._load_config(args)
        return as_holdfast(prepared(config)), rest


def prepared(config: Any) -> Any:
    """What a registered configuration must not have in a job, where it can be taken out without another result."""
    if hasattr(config.loss, "num_chunks"):
        # Each chunk has a backward pass of its own, within the forward pass. The inner loss of all tokens at once is the
        # same sum, and takes the memory of all logits.
        logger.info("holdfast: the loss is computed as a whole, not in chunks")
        config.loss = config.loss.loss_fn
    if not config.training.disable_cuda_graphs:
        logger.info("holdfast: without CUDA graphs")
        config.training.disable_cuda_graphs = True
    if getattr(config.checkpoint, "async_mode", "disabled") != "disabled":
        # It would make a process group for them, before the workers are connected.
        logger.info("holdfast: torchtitan's checkpoints are written synchronously, while one replica waits")
        config.checkpoint.async_mode = "disabled"
    if config.debug.seed is None:
        # Without one torchtitan broadcasts one, before the workers of a replica are connected.
        logger.info("holdfast: --debug.seed 0, since none was given")
        config.debug.seed = 0
    return config


def run(args: list[str] | None = None) -> None:
    """Parses as torchtitan does, and trains as a member of the job; under plain `python`, as a job of one."""
    import holdfast

    init_logger()
    config = Manager().parse_args(args)
    holdfast.start(main(lambda: copy.deepcopy(config)))


if __name__ == "__main__":
    try:
        run()
    except UsageError as error:
        # A worker's goes up to Holdfast, which ends the job with it. As an exit code it would look like a crash.
        if attachment() is not None:
            raise
        sys.exit(str(error))
