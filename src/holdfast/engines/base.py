"""The interface of an engine, which provides the nodes of a job, for the command line and for launchers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from holdfast import plugins
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.engines.client import Reach
    from holdfast.engines.jobs import Allocation, JobFolder
    from holdfast.engines.run_options import RunOptions
    from holdfast.engines.shown import View
    from holdfast.protocol.engine_orders import EngineTraits, ReleaseNode
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport


@dataclass(frozen=True, kw_only=True)
class KnownNodes:
    """What an engine knows of its nodes before a job is planned."""

    count: int | None = None
    """Number of nodes, spares included; None: as many as are requested."""
    gpus: int = 0
    """GPUs of each node; 0: counted on this machine."""
    place: str = ""
    """Where the nodes are if their devices cannot be counted on this machine, for messages: `the hosts`. Empty: they can be
    counted."""
    names: str = ".*"
    """Regular expression that matches a node's whole name. A topology file has to name at least one such node."""
    examples: str = ""
    """Some of the names, for messages."""


class Engine:
    """What `holdfast run --engine NAME` finds under NAME among the entry points of the group `holdfast.engines`.

    A subclass has `launch`, or `run` where jobs are not launched from this machine. `holdfast run --help` makes one of every
    engine of Holdfast's own, so its module imports what it needs in its methods.
    """

    options: ClassVar[type[Any] | None] = None
    """A frozen dataclass whose fields are options of `holdfast run`, declared as in `protocol/options.py`. All have defaults."""
    title: ClassVar[str] = ""
    """Their heading in the help."""
    heeds: ClassVar[tuple[str, ...]] = ()
    """Of options that are shared with another engine, the flags that have an effect for this one. Empty: all."""

    submits: ClassVar[bool] = False
    """Whether the job continues without this process, which then writes no log into the job's folder."""

    def run(self, asked: RunOptions) -> int | None:
        """Runs the job from its options to its end; returns the exit code.

        None, as for most engines: `holdfast run` does this, with the methods below.
        """
        return None

    def nodes(self, options: Any) -> KnownNodes:
        """What is known of the nodes. options: an instance of `options`.

        Raises:
            UsageError: an option has an invalid value.
        """
        return KnownNodes()

    def plan(self, spec: JobSpec, options: Any) -> JobSpec:
        """Adds what the engine needs to the job's specification. By default the options are stored in it, see `of`.

        Raises:
            UsageError: the job cannot run here. Nothing has been started or written.
        """
        import msgspec

        kept = msgspec.to_builtins(options) if self.options is not None else {}
        return msgspec.structs.replace(spec, engine_options=kept)

    def of(self, spec: JobSpec) -> Any:
        """The options that `plan` has stored in the specification of a job."""
        from functools import partial

        import msgspec

        from holdfast.protocol.wire.decoding import decode

        read = partial(msgspec.convert, type=self.options)
        return decode(
            read, spec.engine_options, f"the options of the engine {spec.engine} in spec.json are damaged"
        )

    def preview(self, spec: JobSpec) -> str | None:
        """What `--dry-run` prints; None: the specification."""
        return None

    async def launch(self, spec: JobSpec, folder: JobFolder, view: View, port: int) -> JobReport:
        """Runs a job to its end; returns its report. Most engines call `Launcher.run`.

        Args:
            folder: the job's folder, whose lock this process holds.
            view: shows the job.
            port: of the coordinator; 0: any.

        Raises:
            UsageError: the job cannot start; nothing has been started, and its folder is removed again.
        """
        raise NotImplementedError

    def reach(self, folder: Path, allocation: Allocation) -> Reach | None:
        """How commands reach a running job; None: by the address in its folder.

        Args:
            folder: the job's folder.
            allocation: what `jobs.write_allocation` has written there.
        """
        return None


def engine_named(name: str) -> Engine:
    """The engine of this name.

    Raises:
        UsageError: there is none, or it cannot be used.
    """
    point = plugins.find(plugins.ENGINES, name)
    if point is None:
        *most, last = plugins.names(plugins.ENGINES)
        raise UsageError(f"--engine must be {', '.join(most)} or {last} (got {name!r})")
    found = point.load()
    try:
        engine = found() if isinstance(found, type) else found
    except Exception as error:
        raise point.broken(f"{type(error).__name__}: {error}") from error
    if not isinstance(engine, Engine):
        raise point.broken("not an Engine of holdfast.engines.base")
    return engine


class NodeProvider(Protocol):
    """Provides the nodes of a running job, and releases them. A node has joined once its agent is connected to the coordinator.

    Attributes:
        traits: what the coordinator has to know of the engine.
    """

    @property
    def traits(self) -> EngineTraits: ...

    async def provide(self) -> bool:
        """Starts one more node; False if none is available."""
        ...

    async def release(self, order: ReleaseNode) -> None:
        """Makes sure that nothing of the job still runs on the node."""
        ...

    async def mark(self, node: str, reason: str) -> None:
        """Tells the node's owner, a scheduler or a person, that it is bad, so that no job gets it."""
        ...

    async def reboot(self, node: str, reason: str) -> None:
        """Reboots a node that was released; it joins again as a new one."""
        ...

    async def close(self, gives_back: bool = True) -> None:
        """Ends all nodes; returns when they are gone.

        gives_back: whether to free their snapshot memory as well. If not, it is kept for the job's next start where the nodes
        remain this user's.
        """
        ...
