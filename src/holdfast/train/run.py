"""What a training script uses: `start(main)` and the `Run` that it hands to `main`."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from holdfast.data.batches import DatasetBatches
from holdfast.data.decoding import is_decoder
from holdfast.errors import JobStopped, UsageError
from holdfast.protocol.job import REPLAY_VARIABLE
from holdfast.protocol.notices import Notice
from holdfast.train import script, state_image, torchrun_world, worker
from holdfast.train.buffer_rules import Advice, BufferRule, BufferRules, check_rule
from holdfast.train.constants import Constants
from holdfast.train.data_cursor import NAME, BatchChanged, DataCursor
from holdfast.train.exact import ExactSum, Reduction, prepare
from holdfast.train.faults import FaultPlan
from holdfast.train.link import Warnings
from holdfast.train.place import World
from holdfast.train.reduction import GradientSum
from holdfast.train.replica import Replica, RunMainAgain
from holdfast.train.sharding import Sharding
from holdfast.train.step import Step


class Run:
    """One training run, as one of its workers sees it.

    Attributes:
        device: the device on which this worker computes.
    """

    def __init__(self, attachment: worker.Attachment) -> None:
        self._attachment = attachment
        self._protected: dict[str, Any] = {}
        self._constant: dict[str, torch.nn.Module] = {}
        self._buffer_rules: list[tuple[BufferRule, tuple[str, ...]]] = []
        # The lines that errors tell the user to write. The user of an adapter writes other lines.
        self.advice = Advice()
        self._replica: Replica | None = None
        self._step: Step | None = None
        self._cursor: DataCursor | None = None
        self._resized: list[Callable[[World], object]] = []
        self._on_commit: list[Callable[[Step], object]] = []
        self._known_size: int | None = None
        self._warnings = Warnings(attachment.link.notices)
        self._sharding: Sharding | None = None
        local = int(os.environ.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            # Set once, before the script builds anything: `cuda` without a number would mean GPU 0 on all
            # workers of a node.
            torch.cuda.set_device(self.device)  # FSDP2 and the meshes take the current one

    @property
    def alone(self) -> bool:
        """Whether the script was started by plain `python`, without a job."""
        return self._attachment.alone

    @property
    def job(self) -> str:
        """The name of the job, which is the same in all of its starts; "" without a job."""
        return self._attachment.link.start.env.get("TORCHELASTIC_RUN_ID", "")

    @property
    def sharded(self) -> bool:
        """Whether a replica consists of several workers, because `mesh` was called."""
        return self._sharding is not None

    @property
    def rank(self) -> int:
        """Rank of this worker in the running generation; it may change between two steps. Workers that compute have the
        lowest ranks. A worker of an incomplete sharded replica (`run.world.replica` is -1) has a rank of `world_size` or more."""
        return self._replica.place.rank if self._replica else 0

    @property
    def world_size(self) -> int:
        """Workers that compute in the running generation: those of complete replicas, each of `shard * tensor` workers."""
        return self._replica.place.world_size if self._replica else 1

    @property
    def full_world_size(self) -> int:
        """Number of workers of the job at full strength, without spares; the same on every worker and in every generation. If
        a global batch has fewer micro-batches than that, only as many workers train."""
        return self._attachment.target

    @property
    def world(self) -> World:
        """The workers that train now: rank, size, generation, and which micro-batches this one computes."""
        return self._replica.place.world if self._replica else World(0, 1, 0, range(0))

    def on_resize(self, callback: Callable[[World], object]) -> None:
        """Calls `callback(run.world)` on every worker before the first step, and between two steps whenever the number
        of workers that compute has changed. A script does not have to react; this is only for information.
        """
        self._resized.append(callback)

    def on_commit(self, callback: Callable[[Step], object]) -> None:
        """Calls `callback(step)` in every commit: exactly once for each committed step, on every replica, before the state
        can be fetched by other workers. Callbacks are called in the order in which they were given here, after the update
        and after the functions that were given to `step.apply`.

        The same holds for a step whose commit is decided after a fault, while this worker waits for others that may be gone.
        So a callback must use local state only: a collective in it would hang. It may read the step's `index`, `loss`,
        `grad_norm` and `skipped`, and change protected state. If it raises, the state counts as lost on this worker.

        Raises:
            UsageError: `callback` cannot be called, or this is called after `steps`: newcomers run the script from its
                beginning, so they would not have the callback yet.
        """
        if self._replica is not None:
            raise UsageError(
                "run.on_commit() was called after run.steps(); register every function before the first step"
            )
        if not callable(callback):
            raise UsageError(
                f"run.on_commit(): a {type(callback).__name__} is not callable; pass a function that takes the step"
            )
        self._on_commit.append(callback)

    @property
    def notice(self) -> Notice | None:
        """The most urgent notice that this worker's node or its job is about to go away, or None. See `holdfast.Notice`.
        The remaining time counts from this call. A notice that was withdrawn is not returned."""
        return self._attachment.link.notices.first()

    def on_warning(self, callback: Callable[[Notice], object]) -> None:
        """Calls `callback(notice)` between two steps, on the script's own thread, when this worker's node or the job is about
        to go away: because of a drain, a preemption, a time limit or a stop. It is called once for each notice; a worker that
        joins later gets the notices that still hold. It is not called for a notice that was withdrawn before the end of the
        step. A worker whose place a spare takes at once may be gone before it is called.

        The protected state is saved or handed over without the script's help. Use this for things that only the script
        knows, such as its own files. The callback may run until the notice's deadline, and the other workers wait for it.

        Raises:
            UsageError: `callback` cannot be called.
        """
        if not callable(callback):
            raise UsageError(
                f"run.on_warning({callback!r}): a {type(callback).__name__} is not callable; pass a function that "
                "takes a notice"
            )
        self._warnings.add(callback)

    @property
    def generation(self) -> int:
        """Number of the running generation; grows with every change of the membership."""
        return self._replica.place.generation if self._replica else 0

    @property
    def samples(self) -> int:
        """Number of samples in all committed steps. A schedule that uses it does not depend on the global batch."""
        return self._cursor.samples if self._cursor else 0

    @property
    def stopped(self) -> bool:
        """Whether training ends before the last step. `steps` then raises `JobStopped`; this is for use in a `finally`."""
        return self._replica is not None and self._replica.stopped

    def mesh(self, shard: int = 1, tensor: int = 1, context: int = 1, stage: int = 1) -> DeviceMesh:
        """The DeviceMesh of this worker's replica: `replicate` x `shard`, x `stage`, x `context` and x `tensor` where these
        are more than 1.

        For models that are sharded: give it, or its part `mesh["shard"]`, to FSDP2's `fully_shard`, and
        `mesh["tensor"]` to tensor parallelism; then call `replicate`. A replica is `shard * stage * context * tensor` workers
        with neighbouring ranks. The `replicate` dimension always has one member here: the run itself sums over the replicas,
        whose number may change. The product is fixed for the life of a job.

        Torch's world is the replica from now on, and torchrun's variables say so. A script or a framework may make further
        meshes of it, with other dimensions for some of the parameters (those of experts, for example).

        Args:
            shard: workers with micro-batches of their own.
            tensor: workers that compute the very same, each of them a part of every layer.
            context: workers that share each sample, and compute a loss of their part of it. Parameters are then to be
                sharded over both, `shard` and `context`: by a mesh of your own, `init_device_mesh(type, (shard * context, tensor),
                mesh_dim_names=("data", "tensor"))`.
            stage: stages of a pipeline, each with a model of its own layers. They compute a micro-batch together, by
                `step.pipeline`.

        Raises:
            UsageError: sizes that do not fit the job, a call after `steps`, a default process group of the script's, or a
                job under `--replay`.
        """
        if self._replica is not None:
            raise UsageError("run.mesh() was called after run.steps(); make the mesh before the model")
        # Here and not at the first step: until then a large model would be built and loaded for nothing.
        if every := self._replays_one_in():
            raise UsageError(
                f"--replay 1/{every} computes a micro-batch again on a worker that holds the whole model, which no "
                "worker does after run.mesh(); start the job without --replay: replicas still compare checksums of "
                "their state (the rule state-apart)"
            )
        if self._sharding is None:
            where = self._attachment
            self._sharding = Sharding(
                shape=(shard, tensor),
                position=where.position,
                device=self.device,
                host=where.link.start.host,
                target=where.target,
                called=self._on_collective,
                context=context,
                stages=stage,
            )
            if not self.alone:
                given = where.link.start.env
                torchrun_world.show(self._sharding.shard_index, self._sharding.size, given)
        elif self._sharding.degrees != (shard, stage, context, tensor):
            before = "shard={}, stage={}, context={}, tensor={}".format(*self._sharding.degrees)
            raise UsageError(f"run.mesh() was already called with {before}; a run has only one mesh")
        return self._sharding.mesh

    def replicate(self, model: torch.nn.Module) -> None:
        """Sums this model's gradients over the replicas. Called once for every model that was sharded over `mesh`, after
        `fully_shard` and before `steps`; a model that is not sharded needs no such call.

        Raises:
            UsageError: no mesh was made, or a parameter is neither sharded nor replicated over it.
        """
        if self._sharding is None:
            raise UsageError(
                "run.replicate() was called before run.mesh(): shard the model over run.mesh() first"
            )
        self._sharding.replicate(model)

    def _on_collective(self, begins: bool) -> None:
        if self._replica is not None:
            self._replica.on_collective(begins)

    def protect(self, **objects: Any) -> None:
        """Names the state that must survive: modules, optimizers, schedulers, or anything with
        `state_dict` and `load_state_dict`. Call it before `steps`, with the same names on every worker.

        From then on a step's commit alone changes them: the optimizer, the scheduler and `also` of `step.apply`. A change
        made elsewhere would be lost or made twice by a fault; it is found at the next step's edge and refused. Buffers
        that forward passes change need a rule: see `buffers`. An object with an attribute `changes_between_steps` that is true
        may change between two steps as well, if it changes alike on every worker.

        Raises:
            UsageError: an object without these methods, a lazy module without its shapes, an optimizer that needs a
                closure, or a call after `steps`.
        """
        if self._replica is not None:
            raise UsageError(
                "run.protect() was called after run.steps(); protect everything before the first step"
            )
        if NAME in objects:
            raise UsageError(
                f"run.protect({NAME}=...): this name is reserved for the position in the data; choose another one"
            )
        state_image.check_protected(objects)
        self._protected.update(objects)

    def constant(self, **modules: torch.nn.Module) -> None:
        """Names state that never changes, such as the frozen base under LoRA's adapters. Call it before `steps`, with the same
        names on every worker. The modules may be protected, too: then what is constant in them is left out of the state.

        Constant is every parameter that takes no gradient when `steps` is called; of a module of which none takes one, the
        buffers too. It is hashed once, and is in no snapshot or checkpoint: these have its hash, and are refused by a script
        that has other bytes. So the script builds it at every start. A newcomer with the same bytes fetches
        none of it, and any other one fetches it from a peer.

        A change is found at the edges of a step where torch counts it, otherwise after the last step, or when a newcomer
        fetches it.

        Raises:
            UsageError: no module, or a call after `steps`. `steps` raises it for a module of which no parameter is frozen.
        """
        if self._replica is not None:
            raise UsageError(
                "run.constant() was called after run.steps(); pass every constant before the first step"
            )
        for name, module in modules.items():
            if not isinstance(module, torch.nn.Module):
                raise UsageError(
                    f"run.constant({name}=...): a {type(module).__name__} is not a module; pass only modules to "
                    "run.constant, and everything else to run.protect"
                )
        self._constant.update(modules)

    def buffers(self, rule: BufferRule, *names: str) -> None:
        """Says what a commit makes of buffers that forward passes change, such as running statistics or the loads of
        experts. Every protected buffer that a forward pass changes needs a rule; a script without one is told in its first
        step. Those of torch's batch and instance norms ("sequence") and of spectral norm ("mean") have theirs without a call.
        Call it before `steps`, alike on every worker; where two calls name a buffer the later one counts.

        Args:
            rule: "sequence": a running average of torch's norms becomes what plain torch gets on one worker, which computes the
                micro-batches of the global batch one after the other. "mean": every micro-batch starts from the value that
                the last commit left, and the mean over the micro-batches is committed; so a running average or a power
                iteration moves once in a step, and not once in a micro-batch. "sum": in the same way, with the sum of what the
                micro-batches change. "min" and "max": of a range that only grows. All five give the same at any number of
                workers (to the last bit under `reduction="exact"` and after `run.mesh()`), and cost one more small
                reduction, after `run.mesh()` two. "restore": the value before the step is put back. "own": each worker keeps its own, and newcomers take
                another's; this alone is left out of the comparison of all replicas at the end.
            names: paths as in the state, `model.1.running_mean`, or patterns with `*`. None: every buffer.

        A buffer with a rule other than "own" also gets the committed value back between two steps, so an evaluation leaves no
        trace in it. The sums are there when `also` of `step.apply` and `run.on_commit` are called, which may change it
        further. A step that is committed without an update leaves it as it was.

        Raises:
            UsageError: another rule, or a call after `steps`. `steps` raises it for a name that no buffer has, and for a
                buffer that cannot be summed.
        """
        check_rule(rule, f"run.buffers({rule!r})")
        if self._replica is not None:
            raise UsageError(
                "run.buffers() was called after run.steps(); set every rule before the first step"
            )
        self._buffer_rules.append((rule, names))

    def steps(
        self,
        data: Any,
        *,
        global_batch: int,
        micro_batch: int,
        until: int,
        seed: int = 0,
        reduction: Reduction = "fast",
        batch_changed: BatchChanged = "refuse",
        ledger: str | os.PathLike[str] | None = None,
    ) -> Iterator[Step]:
        """Yields one `Step` after the other until `until` are committed, each to be used in a `with`.

        A step that a fault struck is yielded again under the same index, unless it could be committed. The loop ends normally
        when all `until` are committed, and not otherwise: what comes after it has a trained model.

        Args:
            data: a map-style dataset; its `batch(ids)` is used when it has one, else `data[i]` and
                torch's default collation. One that decodes goes into `holdfast.data.shuffled(dataset, workers=...)`.
            global_batch: samples per step over all workers, whatever their number.
            micro_batch: samples per forward pass; divides global_batch.
            until: number of steps.
            seed: of the sample order and of the randomness inside micro-batches.
            reduction: "fast": all-reduce; the world size changes the order of additions and so the last bits (relative
                error of the gradient at most 1e-6). "exact": losses and parameters are those of a run on one worker,
                bit by bit, at any sequence of world sizes. That needs the same kind of processor and number of threads
                (OMP_NUM_THREADS) everywhere, and on CUDA deterministic algorithms; chance must come from torch's default
                generators. It keeps up to 1 + log2 of a worker's micro-batches sums of gradients in memory.
            batch_changed: what becomes of the learning rates of the protected optimizers and schedulers when the job
                goes on from a state that was made with another global batch: "keep", "linear" or "sqrt" (see
                `holdfast.scale_lr`). "refuse": such a state is refused. The data goes on at the next sample.
            ledger: a folder for a record of every committed step's samples; `holdfast data samples` reads it.

        Raises:
            UsageError: no module is protected, an optimizer trains what is in none, or sizes that do not fit; before
                anything is computed. A saved state of another global batch, seed or data set.
            StateChanged: protected state changed outside of a commit, or parameters were added.
            JobStopped: the job ends before that: it was asked to stop, or failed elsewhere, or this worker's node is drained.
        """
        modules = [t for t in self._protected.values() if isinstance(t, torch.nn.Module)]
        if not modules:
            raise UsageError(
                "there is nothing to train: call run.protect(model=model, optimizer=optimizer) first"
            )
        state_image.check_optimizers(self._protected)
        state_image.check_restorable(self._protected)
        threads = prepare(reduction, self.device)
        token = self._attachment.link.token  # each launch has its own
        batches = DatasetBatches(
            data,
            global_batch=global_batch,
            micro_batch=micro_batch,
            until=until,
            seed=seed,
            device=self.device,
            ledger=ledger,
            launch=xxhash.xxh3_64_hexdigest(token.encode()),
        )
        try:
            every = self._replay_every(reduction)
            probe = None if self.alone else batches.probe()
            cursor = DataCursor(global_batch, seed, batches.dataset, threads, batch_changed, probe)
            self._cursor = cursor
            # As a whole path: who checks the record later stands in another folder.
            samples = str(Path(ledger).absolute()) if ledger else ""
            replica = self._enroll(modules, batches.count(), cursor, reduction, until, samples)
            loss = math.nan
            while not replica.stopped and replica.committed < until:
                self._warn(replica)
                self._tell_size(replica)
                self._step = Step(
                    replica,
                    batches,
                    replica.committed,
                    seed,
                    cursor,
                    on_commit=self._on_commit,
                    replay_every=every,
                    loss_before=loss,
                    warns_of_means=self._step is None and not replica.place.rank,
                )
                replica.hand_over()
                try:
                    yield self._step
                # Without this a script that leaves the loop by `break` would look like a worker that is lost,
                # and the others would recover from it.
                except GeneratorExit:  # the script left the loop early: on purpose, or by an error
                    replica.done(stopped=replica.stopped)
                    raise
                replica.take_back()
                loss = self._step.loss
                # Before a generation ends here: those who leave with it run no further code of the script's.
                self._warn(replica)
                replica.after_step()
            self._warn(replica)  # what came while this worker waited for the order to leave
            replica.done(stopped=replica.stopped)
            if (done := replica.committed) < until:
                raise JobStopped(
                    f"training ends after {done} of {until} steps, because the job was stopped, failed elsewhere, or "
                    "no longer needs this worker; the code after the loop is not run"
                )
        finally:
            batches.close()

    def _tell_size(self, replica: Replica) -> None:
        size, before = replica.place.world_size, self._known_size
        self._known_size = size
        if size == before or not self._resized:
            return
        with replica.off_step():
            for callback in self._resized:
                callback(replica.place.world)

    def _warn(self, replica: Replica) -> None:
        # Only between two steps: a callback that ran while others wait in a collective would look like a
        # hang, and one of a worker that is about to be broken off would be half done.
        if not self._warnings.due():
            return
        # Nobody waits for a worker that was told to leave.
        with nullcontext() if replica.stopped else replica.off_step():
            for call in self._warnings.calls():
                call()

    def log(self, **values: float) -> None:
        """Reports figures of the step that was just left; ignored when it did not count.

        Rank 0's values count: they go into the job's ledger, its status, its report and `/metrics`
        (`holdfast_run_value`). Without `holdfast run` they go nowhere.

        Raises:
            UsageError: a value that is no number, more than 64 names in a run, or a name of more than 64 characters.
        """
        # A step that was dropped is computed again, maybe by others. Its figures would stand in the ledger
        # beside those of the step that counts.
        if self._step is None or not self._step.committed or self._replica is None:
            return
        try:
            figures = {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"run.log(): {error}; pass numbers, or tensors with one element") from error
        self._replica.log(self._step.index, figures)

    @contextmanager
    def relaxed_watchdog(self) -> Iterator[None]:
        """For work between two steps that takes longer than a step: evaluation, a checkpoint of the script's own.

        A worker that keeps the others waiting for `max(3 s, 5 median steps)` counts as hung and is replaced. Inside this
        block the limit is that of a start: 5 minutes by default. After the last step it changes nothing.

        After `run.mesh()` the work may use the sharded model. A fault in such a call is swallowed, as in a step: the rest
        of the block is skipped, and training continues. Where `run.world.replica` is -1 the results mean nothing.

        Protected modules may be written into here if they are put back, as weights that are swapped for an evaluation are:
        their content is read before and after the block, which takes some 0.1 s for each GB in host memory.

        Raises:
            UsageError: it is used inside `with step`.
            StateChanged: protected state is not what it was before.
        """
        if self._replica is None:
            yield
            return
        with self._replica.off_step(proves=True):
            yield

    def close(self) -> None:
        """`main` is about to be run again, or a job of one has ended: gives back what only one run may have."""
        if self._replica is not None:
            self._replica.gradients.close()
        if self._sharding is not None:
            self._sharding.close()

    def _replays_one_in(self) -> int:
        """One step of so many has a micro-batch that is computed twice; 0: none has."""
        return int(self._attachment.link.start.env.get(REPLAY_VARIABLE, "0"))

    def _replay_every(self, reduction: Reduction) -> int:
        every = self._replays_one_in()
        if every and reduction != "exact":
            raise UsageError(
                f'--replay 1/{every} compares gradients bit by bit, but run.steps(reduction="{reduction}") does not '
                'compute them reproducibly; use reduction="exact", or remove --replay'
            )
        assert not every or self._sharding is None  # `mesh` refuses it
        return every

    def _enroll(
        self,
        modules: list[torch.nn.Module],
        micro_batches: int,
        cursor: DataCursor,
        reduction: Reduction,
        until: int,
        samples: str,
    ) -> Replica:
        if self._replica is not None:
            raise UsageError(
                "run.steps() can be called only once per run; to train several epochs, increase `until`"
            )
        minimum = self._attachment.minimum
        sharding = self._sharding
        if sharding is not None:
            sharding.check(modules)
            self._protected = sharding.named(self._protected)
            minimum = -(-minimum // sharding.size) * sharding.shape[0]
            if micro_batches % sharding.shape[0]:
                raise UsageError(
                    f"global_batch / micro_batch = {micro_batches} micro-batches cannot be divided evenly among the "
                    f"{sharding.shape[0]} shards of a replica: make the number a multiple of {sharding.shape[0]}"
                )
        # A job that may be smaller is, and says so: see `FewMicroBatches`.
        if micro_batches < minimum:
            raise UsageError(
                f"global_batch / micro_batch = {micro_batches} micro-batches are too few for {minimum} workers; use "
                "a smaller micro_batch or a larger global_batch"
            )
        rules = BufferRules(
            self._protected,
            self._buffer_rules,
            sharded=sharding is not None,
            exact=reduction == "exact",
            advice=self.advice,
            alike=sharding.alike if sharding is not None else 1,
            parts=sharding.context if sharding is not None else 1,
        )
        shards = (sharding.shard_index, sharding.size) if sharding is not None else (0, 1)
        constants = Constants(self._constant, shards)
        beat: list[Replica] = []
        # Each once, in the order of the modules. Tied parameters stand in several modules, and a gradient
        # that is reduced twice is twice too large.
        parameters = dict.fromkeys(p for module in modules for p in module.parameters())
        kind = ExactSum if reduction == "exact" else GradientSum
        counts = sharding.counts if sharding is not None else lambda p: True
        gradients = kind(parameters, lambda: beat[0].alive(), counts)
        replica = Replica(
            link=self._attachment.link,
            faults=self._attachment.faults,
            protected=self._protected | {NAME: cursor},
            gradients=gradients,
            device=self.device,
            alone=self._attachment.alone,
            sharding=sharding,
            endpoint=self._attachment.endpoint(),
            buffer_rules=rules,
            constants=constants,
        )
        beat.append(replica)
        self._replica = replica
        replica.announce(micro_batches, until, samples)
        return replica


def start(main: Callable[[Run], object]) -> None:
    """Runs `main(run)`: as a member of the job under `holdfast run`, as a job of one under plain `python`.

    While `main` runs, torchrun's variables are those of one process, or of the replica after `run.mesh()`.
    """
    # It imports the script for the dataset's class, and needs no `if __name__ == "__main__"`.
    if is_decoder():
        return
    attachment = worker.attach()
    if attachment is not None:
        worker.leave_sigterm_to_the_agent()
        _run(main, attachment)
    else:
        script.print_errors_of_ours_shortly()
        with closing(worker.alone()) as attachment, closing(Run(attachment)) as run, _under_way(run):
            main(run)
    sys.stdout.flush()


_begun: list[Run] = []
"""The run whose `main` is under way in this process."""


def under_way() -> Run | None:
    """The run of the `main` that this is called in; None outside of `start`."""
    return _begun[-1] if _begun else None


@contextmanager
def _under_way(run: Run) -> Iterator[None]:
    _begun.append(run)
    try:
        yield
    finally:
        _begun.remove(run)


def _run(main: Callable[[Run], object], attachment: worker.Attachment) -> None:
    """As a worker of a job: again for every shard that this worker takes the place of."""
    while True:
        run = Run(attachment)
        try:
            with torchrun_world.world_of_one(attachment.link.start.env), _under_way(run):
                main(run)
            return
        except RunMainAgain as order:
            # Kept outside of the run, which is thrown away: `run.mesh()` of the next call asks for it.
            attachment.shard_index = order.shard_index
        run.close()
        del run
        # Parameters, hooks and the run form circles. Until they are collected the old model's memory is
        # taken, and two models may not fit.
        gc.collect()


__all__ = ["FaultPlan", "Run", "start"]
