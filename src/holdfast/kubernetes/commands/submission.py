"""Creates a job's objects at the API server. Everything that can be refused is refused before anything is created."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.kubernetes import names
from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoApiAnswer
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.check import Problem, check, convert
from holdfast.kubernetes.objects.resource import API_VERSION, GROUP, KIND, VERSION, job_path
from holdfast.kubernetes.objects.status import status_of

MANAGER = "holdfast"
"""Field manager of what the command line applies."""
CODE_BYTES = 1_000_000
"""Largest script that is sent along. A ConfigMap has at most 1 MiB altogether."""
ACCOUNT_S = 30.0
"""Seconds that the cluster's controllers may take to create the service account of a new namespace."""
_NO_ACCOUNT = 'serviceaccount "default" not found'
"""Message with which a pod is refused until then (in 1.34 and 1.37). Accounts of other names are not created automatically."""
Object = dict[str, Any]


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job to create."""

    name: str
    namespace: str
    context: str
    """Of the kubeconfig; empty: its current one."""
    spec: Object
    queue: str = ""
    """Kueue's LocalQueue; empty: none."""
    code: dict[str, str] | None
    """File to text, for the ConfigMap that `spec.run.code` names; None: the image has the code."""

    @property
    def job(self) -> Object:
        """The HoldfastJob."""
        queue = {"labels": {names.LABEL_QUEUE: self.queue}} if self.queue else {}
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self.name, "namespace": self.namespace, **queue},
            "spec": self.spec,
        }

    def config_map(self, uid: str = "") -> Object | None:
        """The ConfigMap with the code; None: there is none. uid: of the job that owns it; empty: it has no owner yet."""
        if self.code is None:
            return None
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": uid}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"{self.name}-code",
                "namespace": self.namespace,
                "labels": {names.LABEL_JOB: self.name},
                **({"ownerReferences": [owner]} if uid else {}),
            },
            "data": self.code,
        }

    def objects(self) -> list[Object]:
        """All objects, in the order in which they are created."""
        code = self.config_map()
        return [*([code] if code is not None else []), self.job]


def refuse_wrong(submission: Submission) -> None:
    """Raises UsageError with each invalid field, its value and what is accepted."""
    if found := check(submission.job):
        raise UsageError(_refusal(found, ""))


async def submit(
    client: Api, submission: Submission, tell: Callable[[str], None], account_s: float = ACCOUNT_S
) -> str:
    """Creates the objects; returns the job's uid.

    Args:
        client: of the API server.
        submission: the job to create.
        tell: receives a message before a longer wait.
        account_s: see `ACCOUNT_S`.

    Raises:
        UsageError: the job is invalid, the API server refuses it, or the name is taken. Nothing was created.
    """
    try:
        # First of all, because applying would change an existing job of this name.
        await _refuse_taken(client, submission)
        await _dry_run(client, submission, tell, account_s)
        # The code before the job, because a pod that starts at once mounts it.
        code = submission.config_map()
        if code is not None:
            await client.apply(_config_map_path(submission), code, manager=MANAGER)
        made = await client.apply(
            job_path(submission.namespace, submission.name), submission.job, manager=MANAGER
        )
        uid = str(made["metadata"]["uid"])
        owned = submission.config_map(uid)
        if owned is not None:
            # Now that the job exists it becomes the owner, so that the code is deleted together with it.
            await client.apply(_config_map_path(submission), owned, manager=MANAGER)
    except ApiError as error:
        raise UsageError(f"the API server refused the job: {error}") from None
    except NoApiAnswer as error:
        raise UsageError(f"the API server does not answer: {error}") from None
    return uid


async def _refuse_taken(client: Api, submission: Submission) -> None:
    try:
        await client.get(f"/apis/{GROUP}/{VERSION}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise UsageError(
            "this cluster does not know HoldfastJobs, because the operator is not installed (docs/kubernetes.md has "
            "the two commands)"
        ) from None
    try:
        there = await client.get(job_path(submission.namespace, submission.name))
    except ApiError as error:
        if error.status == 404:
            return
        raise
    status = status_of(there, UsageError)
    where = f"--job {submission.name}: the namespace {submission.namespace!r} already has a job of this name"
    if status.has_ended:
        raise UsageError(
            f"{where}, which has ended ({status.state}): `kubectl delete hj {submission.name} -n "
            f"{submission.namespace}` removes it, or choose another name"
        )
    raise UsageError(
        f"{where} ({status.state or 'new'}): `holdfast attach --job {submission.name} -n {submission.namespace}` shows it"
    )


async def _dry_run(
    client: Api, submission: Submission, tell: Callable[[str], None], account_s: float
) -> None:
    """Raises UsageError with all problems that are found here and by a server-side dry run."""
    problems = check(submission.job)
    theirs = ""
    try:
        if (code := submission.config_map()) is not None:
            await client.apply(_config_map_path(submission), code, manager=MANAGER, dry_run=True)
        await client.apply(
            job_path(submission.namespace, submission.name), submission.job, manager=MANAGER, dry_run=True
        )
        # The pod for the dry run is rendered here, which requires a valid object.
        if not problems:
            await _try_pod(client, submission, tell, account_s)
    except ApiError as error:
        if error.may_pass:
            raise
        theirs = str(error)
    if problems or theirs:
        raise UsageError(_refusal(problems, theirs))


async def _try_pod(
    client: Api, submission: Submission, tell: Callable[[str], None], account_s: float
) -> None:
    """Creates the first node's pod in a dry run, so that the cluster's Pod Security, quotas and webhooks check it."""
    pod = render.agent_pod(convert(submission.job), 0)
    del pod["metadata"]["ownerReferences"]  # the owner does not exist yet
    backoff, ends_s, is_told = Backoff(most_s=1.0), time.monotonic() + account_s, False
    while True:
        try:
            await client.create(f"/api/v1/namespaces/{submission.namespace}/pods", pod, dry_run=True)
            return
        except ApiError as error:
            # A user who may write jobs need not be allowed to create pods. The operator reports a refusal in the condition
            # Accepted.
            if error.status == 403 and "cannot create resource" in str(error):
                return
            if _NO_ACCOUNT not in str(error) or time.monotonic() >= ends_s:
                raise
            if not is_told:
                tell(
                    f"the namespace {submission.namespace} is new; waiting up to {account_s:g} s for its service "
                    "account"
                )
            is_told = True
            # Polled and not watched, because a user who may write jobs need not be allowed to read service accounts.
            await backoff.wait(error)


def _refusal(problems: tuple[Problem, ...], theirs: str) -> str:
    lines = [f"  {problem}" for problem in problems]
    if theirs:
        lines.append(f"  the API server says: {theirs}")
    return "the job cannot be submitted:\n" + "\n".join(lines)


def _config_map_path(submission: Submission) -> str:
    return f"/api/v1/namespaces/{submission.namespace}/configmaps/{submission.name}-code"
