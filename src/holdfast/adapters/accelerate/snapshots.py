"""Accelerate at level 1: what an Accelerator prepared, in Holdfast's memory tier, and its place in the data."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType

from holdfast.adapters.snapshots import DeferredState, Saver, random_state, set_random_state
from holdfast.adapters.versions import ACCELERATE
from holdfast.errors import UsageError

SPLITTING = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


class Snapshots:
    """Saves what an Accelerator prepared each few steps, and goes on from the newest.

        snapshots = Snapshots(accelerator, every=50)  # after prepare()
        step = snapshots.newest() or 0
        for epoch in range(loader.iteration, 3):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                if accelerator.sync_gradients:
                    step += 1
                    snapshots.save(step)

    Saved are models, optimizers, schedulers, the loss scaler, what `register_for_checkpointing` was given, the random
    generators of each rank, and where each prepared loader is. A loop over such a loader goes on in the middle of its
    epoch by itself: the samples that were trained are read again and left out, so that those after them are the same.
    """

    def __init__(self, accelerator: accelerate.Accelerator, every: int, to: str | None = None) -> None:
        """
        Args:
            accelerator: whose `prepare` was called, in one process or with DDP.
            every: updates between two snapshots.
            to: without `holdfast run`: where to, see `holdfast.checkpoint.save`.

        Raises:
            UsageError: nothing is prepared; a plugin that splits the state over ranks; a loader that keeps its place
                elsewhere; a version of Accelerate that is not supported; or no number of steps.
        """
        ACCELERATE.check(accelerate.__version__, "Snapshots")
        self._saver = Saver(every, to, level_2="holdfast.accelerate")
        if not accelerator._models:
            raise UsageError(
                "Snapshots: this Accelerator does not have a model yet; create Snapshots after prepare()"
            )
        meshed = getattr(accelerator, "parallelism_config", None) is not None  # since 1.10
        if meshed or accelerator.distributed_type in SPLITTING:
            how = "parallelism_config" if meshed else accelerator.distributed_type.value
            raise UsageError(
                f"Snapshots: {how} splits the state over ranks; train with one device or DDP, "
                "or save with accelerator.save_state, which works at level 0"
            )
        for loader in accelerator._dataloaders:
            _refuse(loader)
        self._accelerator: Any = accelerator
        self._places = [_Place(loader) for loader in accelerator._dataloaders]
        accelerator.skip_first_batches = _skips_by_itself

    def newest(self, own: int | None = None) -> int | None:
        """Loads the newest snapshot that all ranks have. Its step; None: there is none, and the training begins.

        Args:
            own: the step of a checkpoint that `accelerator.load_state` has loaded: only a newer snapshot is loaded.

        Raises:
            StateError: snapshots are there, but of another model, or none could be read.
        """
        kept = DeferredState()
        found = self._saver.load({**self._objects(), "accelerator": kept}, own=own)
        if found is None:
            return None
        self._accelerator.step = kept.value["step"]
        # By number and order, since loaders have no names. With one more or less every place after it would
        # be taken for another loader's.
        if len(kept.value["places"]) != len(self._places):
            raise UsageError(
                f"Snapshots: the snapshot was made with {len(kept.value['places'])} prepared data loaders, but this "
                f"script prepared {len(self._places)}; prepare the same data loaders"
            )
        for place, saved in zip(self._places, kept.value["places"], strict=True):
            place.restore(saved, kept.value["random"])
        set_random_state(kept.value["random"])
        return found

    def save(self, step: int) -> bool:
        """Saves, where it is time; call it on every rank after each update, when all of the step is done.

        Args:
            step: updates so far.

        Returns:
            Whether it saved. Not between two updates either, where gradients that are kept over several batches would be
            lost.
        """
        accelerator = self._accelerator
        if not self._saver.due(step) or not accelerator.sync_gradients:
            return False
        # The random generators of this process are one for all loaders. With two loops under way no place
        # could be found by reading one of them again.
        if sum(place.active for place in self._places) > 1:
            raise UsageError("Snapshots: another data loader is being iterated over; save after that loop")
        more = {
            "step": accelerator.step,
            "places": [place.state() for place in self._places],
            "random": random_state(),
        }
        return self._saver.save({**self._objects(), "accelerator": DeferredState(more)}, step)

    def _objects(self) -> dict[str, Any]:
        accelerator = self._accelerator
        groups = {
            "model": [accelerator.unwrap_model(model) for model in accelerator._models],
            "optimizer": [optimizer.optimizer for optimizer in accelerator._optimizers],
            "scheduler": accelerator._schedulers,
            "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
            "registered": accelerator._custom_objects,
        }
        return {f"{name}{i or ''}": one for name, group in groups.items() for i, one in enumerate(group)}


class _Place:
    """Where a prepared loader is: which epoch, how many of its batches the script has.

    A loader reads one batch ahead, and says so before it does (`_update_state_dict`): call number i comes before batch i + 1
    is read, and batch i goes to the script after that.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.active = False
        self._calls = 0
        self._generator: Any = None
        """Of the sampler, when the epoch began."""
        self._begun: Any = None
        """The process's generators, when the epoch began."""
        self._reading: Any = None
        """The same, before the batch that the script has not got yet was read."""
        self._coming: dict[str, Any] | None = None
        """A place that is to be found when the next epoch begins."""
        self._now: Any = None
        """The process's generators at that place."""
        self._own = {name: getattr(loader, name) for name in ("begin", "end", "_update_state_dict")}
        loader.begin, loader.end, loader._update_state_dict = self._begin, self._end, self._before_reading

    def state(self) -> dict[str, Any]:
        end = self.active and self._loader.end_of_dataloader
        generator = self._loader.synchronized_generator
        return {
            "epoch": self._loader.iteration,
            # At the end one more call comes, before the last batch goes to the script.
            "batches": self._calls - end if self.active else None,
            "generator": self._generator if self.active else _state_of(generator),
            "begun": self._begun if self.active else None,
            "reading": self._reading if self.active else None,
        }

    def restore(self, saved: dict[str, Any], now: dict[str, Any]) -> None:
        self._loader.iteration = saved["epoch"]
        if saved["generator"] is not None:
            self._loader.synchronized_generator.set_state(saved["generator"])
        if saved["batches"] is not None:
            self._coming, self._now = saved, now

    def _begin(self) -> None:
        if self._coming is not None:
            self._loader.skip_batches = self._coming["batches"]
            set_random_state(self._coming["begun"])
        self.active, self._calls = True, 0
        self._generator, self._begun = _state_of(self._loader.synchronized_generator), random_state()
        self._own["begin"]()

    def _before_reading(self) -> None:
        if self._coming is not None and self._calls == self._coming["batches"] - 1:
            # Two generators and not one: the last batch before the place is read with the numbers of that
            # time, and what follows is drawn from where the script was when it saved.
            set_random_state(self._coming["reading"])
        elif self._coming is not None and self._calls == self._coming["batches"]:
            set_random_state(self._now)
            self._coming = None
        self._calls += 1
        self._reading = random_state()
        self._own["_update_state_dict"]()

    def _end(self) -> None:
        self.active, self._loader.skip_batches = False, 0
        self._own["end"]()


def _state_of(generator: Any) -> Any:
    return None if generator is None else generator.get_state()


def _refuse(loader: Any) -> None:
    if not isinstance(loader, DataLoaderShard):
        raise UsageError(
            f"Snapshots: {type(loader).__name__} reads the data of all ranks on rank 0; pass "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )
    if loader.use_stateful_dataloader:
        raise UsageError(
            "Snapshots: remove use_stateful_dataloader; the position of a loader is restored without it"
        )


def _skips_by_itself(*args: Any, **more: Any) -> None:
    raise UsageError(
        "Snapshots: remove skip_first_batches, and loop over the prepared loader; it continues where the snapshot "
        "was taken"
    )
