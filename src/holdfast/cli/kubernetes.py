"""`holdfast run --engine kubernetes`: submits the job and follows it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.kube_options import KubernetesOptions
from holdfast.engines.base import Engine

if TYPE_CHECKING:
    from holdfast.engines.client import Reach
    from holdfast.engines.jobs import Allocation
    from holdfast.engines.run_options import RunOptions
    from holdfast.kubernetes.commands.submission import Submission


class Kubernetes(Engine):
    """`--engine kubernetes`: the job is an object of the cluster, and the operator's."""

    options = KubernetesOptions
    title = "Kubernetes, with --engine kubernetes"

    def run(self, asked: RunOptions) -> int:
        """Makes the object and follows it."""
        return run_on_kubernetes(asked)

    def reach(self, folder: Path, allocation: Allocation) -> Reach:
        """The folder has no address: the coordinator is asked for at the API server."""
        from holdfast.kubernetes.commands.reach import KubernetesReach

        return KubernetesReach(folder, allocation)


def run_on_kubernetes(options: RunOptions) -> int:
    """Returns the exit code, see `jobs.exit_code`."""
    from holdfast.cli.kube_plan import plan_submission
    from holdfast.cli.spec import check_engine, check_report, check_text
    from holdfast.kubernetes.commands.submission import refuse_wrong

    check_engine(options)
    check_report(options.report)
    submission = plan_submission(options)
    check_text(submission.objects())
    if options.preview:
        from holdfast.cli.yaml_file import yaml_text

        # Without a cluster only our own checks can speak, and what is printed has passed them.
        refuse_wrong(submission)
        sys.stdout.write(yaml_text([_without_empty(one) for one in submission.objects()]))
        return 0
    folder = _submit(submission)
    return follow(folder, options.no_ui, options.report)


def follow(folder: Path, no_ui: bool, report: Path | None = None) -> int:
    """Shows the job of this folder until it is over or the person leaves; returns the exit code, see `jobs.exit_code`."""
    import asyncio

    from holdfast.cli.view import keep_ticking, view_of, write_report
    from holdfast.engines import jobs
    from holdfast.engines.shown import TolerantView, unread
    from holdfast.kubernetes.commands.follow import Follower
    from holdfast.protocol.job_report import JobReport

    view = view_of(jobs.read_spec(folder), folder, no_ui)

    async def show() -> JobReport:
        ticking = asyncio.create_task(keep_ticking(view))
        try:
            return await Follower(folder, TolerantView(view)).run()
        finally:
            ticking.cancel()

    with view:
        ended = asyncio.run(show())
    if ended.outcome == jobs.LEFT:
        return jobs.EXIT_LEFT
    if report is not None:
        write_report(ended, report)
    if ended.steps is not None:  # a coordinator's own report
        with unread():
            view.ended(ended)
    elif ended.outcome not in ("finished", "stopped"):
        sys.stderr.write(f"[holdfast] the job {folder.name} {ended.outcome}: {ended.reason}\n")
    # `unsaved` of the report is left out: many jobs on Kubernetes have no durable tier, and a script that saved its own model has
    # finished.
    return jobs.exit_code(JobReport(job=folder.name, incidents=[], outcome=ended.outcome))


def _submit(submission: Submission) -> Path:
    """Makes the objects, and a folder here by which commands find the job."""
    import asyncio

    import msgspec

    from holdfast.kubernetes.client.api import connect, current_namespace
    from holdfast.kubernetes.commands.submission import submit

    namespace = submission.namespace or current_namespace(submission.context or None)
    submission = msgspec.structs.replace(submission, namespace=namespace)

    def tell(words: str) -> None:
        sys.stderr.write(f"[holdfast] {words}\n")

    async def make() -> str:
        async with connect(submission.context or None) as client:
            return await submit(client, submission, tell)

    # Before anything is made: a folder stands for one job, and commands would go to the wrong one.
    _folder_of(submission.name, namespace, submission.context)
    uid = asyncio.run(make())
    folder = remember(submission.job, submission.context, uid)
    tell(f"submitted {namespace}/{submission.name}; it continues if this command ends")
    return folder


def remember(raw: dict[str, Any], context: str, uid: str) -> Path:
    """A folder by which commands find a job of a cluster. What an earlier job of this name left there is put away."""
    import msgspec

    from holdfast.engines import jobs
    from holdfast.kubernetes.objects.check import convert
    from holdfast.kubernetes.objects.render import job_spec

    job = convert(raw)
    # It holds the folder's lock: two commands that remember the same job must not mix their files.
    folder = jobs.JobFolder(_folder_of(job.id.name, job.id.namespace, context))
    try:
        known = jobs.read_allocation(folder.path)
        # By the uid: a job that was deleted and made again under its name is another job.
        if known is None or known.id != uid:
            folder.put_away()
        (folder.path / "spec.json").write_bytes(msgspec.json.format(msgspec.json.encode(job_spec(job))))
        allocation = jobs.Allocation(
            engine="kubernetes",
            id=uid,
            namespace=job.id.namespace,
            context=context,
            name="" if job.id.name == folder.path.name else job.id.name,
        )
        jobs.write_allocation(folder.path, allocation)
    finally:
        folder.close()
    return folder.path


def find(name: str, namespace: str, context: str) -> Path:
    """Remembers a job that somebody made, with `kubectl apply` for instance.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    import asyncio

    from holdfast.errors import UsageError
    from holdfast.kubernetes.client.api import ApiError, NoApiAnswer, connect, current_namespace
    from holdfast.kubernetes.objects.check import check
    from holdfast.kubernetes.objects.resource import job_path

    namespace = namespace or current_namespace(context or None)

    async def get() -> dict[str, Any]:
        async with connect(context or None) as client:
            return await client.get(job_path(namespace, name))

    _folder_of(name, namespace, context)
    try:
        raw = asyncio.run(get())
    except ApiError as error:
        raise UsageError(f"--job {name}: the API server refused it: {error}") from None
    except NoApiAnswer as error:
        raise UsageError(f"the API server does not answer: {error}") from None
    if found := check(raw):
        raise UsageError("the job cannot be read: " + "; ".join(map(str, found)))
    return remember(raw, context, str(raw["metadata"]["uid"]))


def located(name: str, namespace: str, context: str) -> Path:
    """The folder of a job of this place. The cluster is asked; of a job that it does not have any more, or where it does not answer,
    what is known here.

    Raises:
        UsageError: there is none, neither there nor here.
    """
    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.kubernetes.client.api import current_namespace

    try:
        return find(name, namespace, context)
    except UsageError:
        folder = _known(name, namespace or current_namespace(context or None), context)
        if folder is None:
            raise
        return jobs.job_dir(folder)


def _known(name: str, namespace: str, context: str) -> str | None:
    """The name of the folder that a job of this place has here; None: it has none."""
    from holdfast.engines import jobs

    for folder in _names(name, namespace):
        known = jobs.read_allocation(jobs.job_dir(folder))
        if known is not None and (known.engine, known.namespace, known.context, known.name or folder) == (
            "kubernetes",
            namespace,
            context,
            name,
        ):
            return folder
    return None


def _names(name: str, namespace: str) -> tuple[str, str]:
    """Of the first of two jobs of one name, and of the other one. No job on Kubernetes has a dot in its name."""
    return name, f"{name}.{namespace}"


def _folder_of(name: str, namespace: str, context: str) -> str:
    """The folder's name of a job of this place, known or new.

    Raises:
        UsageError: other jobs that run have both.
    """
    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    jobs.check_name(name)
    if (known := _known(name, namespace, context)) is not None:
        return known
    for folder in _names(name, namespace):
        if not jobs.is_running(jobs.job_dir(folder)):
            return folder
    other = jobs.read_allocation(jobs.job_dir(folder))
    where = "here" if other is None else f"on {other.engine} {other.namespace} {other.context}".strip()
    raise UsageError(
        f"a job named {name!r} is running {where}: choose another name with --job, or set HOLDFAST_HOME to another "
        "folder"
    )


def _without_empty(made: dict[str, Any]) -> dict[str, Any]:
    """Without the namespace that was not said: kubectl takes the context's."""
    metadata = {key: value for key, value in made["metadata"].items() if value}
    return {**made, "metadata": metadata}
