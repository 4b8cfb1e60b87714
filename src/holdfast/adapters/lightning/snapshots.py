"""Lightning's Trainer at level 1: its state in Holdfast's memory tier, restored by Lightning's own methods."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.adapters.versions import LIGHTNING
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_log = logging.getLogger(__name__)
NOT_RESTORED = (
    "hparams_name",
    "hparams_type",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
)
"""`fit` does not read these of a checkpoint, and they may be objects of any kind."""


class Snapshots(Callback):
    """Saves a trainer's state with `holdfast.checkpoint` each few steps; `fit` goes on from the newest by itself.

        trainer = lightning.Trainer(..., callbacks=[Snapshots(every=50)])

    Saved is what a checkpoint of Lightning's has, the random generators of each rank, and where they were when the epoch
    began: the samples that were trained are read again and left out, so that those after them are the same.
    """

    def __init__(self, every: int, to: str | None = None) -> None:
        """
        Args:
            every: optimizer steps between two snapshots.
            to: without `holdfast run`: where to, see `holdfast.checkpoint.save`.

        Raises:
            UsageError: a version of Lightning that is not supported; holdfast.lightning was imported; or no number of
                steps.
        """
        LIGHTNING.check(lightning.__version__, "holdfast.lightning")
        self._saver = Saver(every, to, level_2="holdfast.lightning")
        self._trainer: Any = None
        self._checked = False
        self._place: dict[str, Any] | None = None
        """Of a snapshot that was loaded and whose place in the data is not found yet."""
        self._made: dict[str, Any] | None = None
        """The random generators when the epoch's iterator was made."""
        self._begun: dict[str, Any] | None = None
        """The same when its first batch was to be read: hooks of the user's may have drawn numbers between."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before Lightning looks for a checkpoint, and when the ranks can talk.

        Raises:
            UsageError: a strategy that splits the state over ranks.
        """
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        if isinstance(trainer.strategy, DeepSpeedStrategy) or not isinstance(
            trainer.strategy, SingleDeviceStrategy | DDPStrategy
        ):
            raise UsageError(
                f"Snapshots: {name} splits the state over ranks; train with one device or DDP, or save with "
                "ModelCheckpoint, which works at level 0"
            )
        # Its wrappers are around the methods of one trainer. Under a second one they would save the first
        # one's state.
        if self._trainer is not None:
            raise UsageError(
                "Snapshots: this object was already used; create one for each Trainer, and call fit() once"
            )
        self._trainer = trainer
        connector, fit_loop = trainer._checkpoint_connector, trainer.fit_loop
        self._around(connector, "resume_start", self._resume)
        self._around(fit_loop, "setup_data", self._make)
        self._around(fit_loop.epoch_loop, "on_run_start", self._make)
        self._around(fit_loop.epoch_loop, "advance", self._advance)

    def _around(self, owner: Any, name: str, ours: Any) -> None:
        own = getattr(owner, name)
        setattr(owner, name, lambda *args, **more: ours(own, *args, **more))

    # ------------------------------------------------------------ where Lightning looks for a checkpoint

    def _resume(self, own: Any, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        own(checkpoint_path, weights_only)
        if self._trainer.state.fn != TrainerFn.FITTING:
            return  # a test after the training, of the checkpoint that the user names
        connector = self._trainer._checkpoint_connector
        theirs = connector._loaded_checkpoint
        kept, place = DeferredState(), DeferredState()
        found = self._saver.load(
            {"lightning": kept, "place": place}, own=theirs["global_step"] if theirs else None
        )
        if found is None:
            return
        connector._loaded_checkpoint = kept.value
        self._place = place.value
        # So it says of a checkpoint whose place in the data nobody finds again.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")

    # ------------------------------------------------------------ where it makes the iterator of an epoch

    def _make(self, own: Any, *fetcher: Any) -> None:
        before, generators = self._iterator(), random_state()
        own(*fetcher)
        if self._iterator() is not before:
            self._made, self._begun = generators, None

    def _iterator(self) -> Any:
        loader = self._trainer.fit_loop._combined_loader
        return loader and loader._iterator

    # ------------------------------------------------------------ between two batches

    def _advance(self, own: Any, fetcher: Any) -> None:
        """Everything of the batch before is done, its validation too, and the next one is not read."""
        trainer = self._trainer
        if not self._checked:
            self._refuse(fetcher)
            self._saver.check(self._state(trainer))
            self._checked = True
        if self._place is not None:
            self._find(fetcher, self._place)
            self._place = None
        elif self._begun is None:
            self._begun = random_state()
        if self._saver.due(trainer.global_step):
            self._saver.save(self._state(trainer), trainer.global_step)
        own(fetcher)

    def _refuse(self, fetcher: Any) -> None:
        if hasattr(fetcher, "iterator_wrapper"):
            raise UsageError(
                "Snapshots: training_step has the argument dataloader_iter, so it may read any number of batches; "
                "write it with the argument batch"
            )
        loaders = self._trainer.fit_loop._combined_loader.flattened
        if self._has_state():
            return
        if any(isinstance(loader, Stateful) for loader in loaders):
            raise UsageError(
                "Snapshots: some of the training loaders have a state_dict and some do not; use either only loaders "
                "with a state_dict or only loaders without"
            )
        for loader in loaders:
            if any(getattr(x, "generator", None) for x in (loader, getattr(loader, "sampler", None))):
                raise UsageError(
                    "Snapshots: the training data has its own random generator, which snapshots do not contain; "
                    "remove generator= and seed torch, or use a loader with state_dict and load_state_dict"
                )

    def _has_state(self) -> bool:
        """Whether Lightning saves and restores the place in the data by itself."""
        return all(
            isinstance(loader, Stateful) for loader in self._trainer.fit_loop._combined_loader.flattened
        )

    def _state(self, trainer: Any) -> dict[str, Any]:
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in NOT_RESTORED:
            state.pop(name, None)
        place = {
            "made": self._made,
            "begun": self._begun,
            "now": random_state(),
            "ranks": trainer.world_size,
        }
        return {"lightning": DeferredState(state), "place": DeferredState(place)}

    def _find(self, fetcher: Any, place: dict[str, Any]) -> None:
        """Reads the epoch's samples up to where the snapshot was taken."""
        fit_loop = self._trainer.fit_loop
        batches = fit_loop.epoch_loop.batch_progress.current.ready
        self._made, self._begun = place["made"], place["begun"]
        if not self._has_state():
            ranks = self._trainer.world_size
            if place["ranks"] != ranks:
                _log.warning(
                    f"the snapshot was made by {place['ranks']} ranks, but now {ranks} train: the rest of this epoch "
                    "does not have exactly the remaining samples"
                )
            rank_zero_info(f"skipping the {batches} batches of the epoch that were already trained on")
            set_random_state(place["made"])
            iter(fetcher)
            set_random_state(place["begun"])
            for _ in range(batches):
                next(fetcher)
        # The snapshot is of the edge between two batches, so nothing is left to do of an earlier one. Lightning would
        # take its loops for interrupted ones, and leave out a validation or the update of a plateau scheduler.
        fit_loop.restarting = False
        set_random_state(place["now"])
