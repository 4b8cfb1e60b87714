"""The way to the API server: as a pod's service account, or as `kubectl` goes there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.kubernetes.api import Api

EXTRA = "holdfast-train[kubernetes]"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet shows a pod its own account."""


@asynccontextmanager
async def connect(context: str | None = None, account: Path = ACCOUNT) -> AsyncIterator[Api]:
    """An API server. context: of the kubeconfig; None: its current one, or within a pod the pod's own account.

    account: the folder of that account, with `token` and `ca.crt`. A token that is renewed there is the one that the next
    request shows.

    Raises:
        UsageError: there is no way to one.
    """
    async with open_client(context, account) as transport:
        yield Api(transport)


@asynccontextmanager
async def open_client(context: str | None = None, account: Path = ACCOUNT) -> AsyncIterator[Any]:
    """The `kubernetes_asyncio.client.ApiClient` of `connect`."""
    try:
        from kubernetes_asyncio import client, config
    except ModuleNotFoundError as error:
        # By the name of what is missing: it may be something that this library needs.
        raise UsageError(f"{error.name} is not installed: pip install '{EXTRA}'") from None
    way = client.Configuration()
    try:
        # A kubeconfig that is named wins over the pod's own account: who sets KUBECONFIG within a pod means
        # another cluster.
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            # Without the library's own renewal, which looks once a minute. After an outage that was longer than a token
            # lives, every request of that minute would be refused.
            config.load_incluster_config(
                way,
                try_refresh_token=False,
                token_filename=str(account / "token"),
                cert_filename=str(account / "ca.crt"),
            )
            way.refresh_api_key_hook = partial(_take_token, account / "token")
        else:
            await config.load_kube_config(_kubeconfig(), context, client_configuration=way)
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster is configured: {error}; set KUBECONFIG to a kubeconfig, as for kubectl"
        ) from None
    async with client.ApiClient(way) as transport:
        yield transport


def _take_token(file: Path, way: Any) -> None:
    """The account's token, as it is in its file now: called before each request."""
    # The kubelet replaces the folder behind a link, so what is read is one token and whole. Where none can be read the last
    # one is shown: whether it still counts is the server's to say.
    try:
        token = file.read_text().strip()
    except OSError:
        return
    if token:
        way.api_key["BearerToken"] = f"Bearer {token}"


def _kubeconfig() -> str | None:
    """None: where kubectl looks without it."""
    # Named each time: the library reads the variable when it is imported, and a process may set it later.
    return os.environ.get("KUBECONFIG") or None


def current_namespace(context: str | None) -> str:
    """The namespace that kubectl would take.

    Raises:
        UsageError: there is no such context.
    """
    try:
        from kubernetes_asyncio import config
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install '{EXTRA}'") from None
    try:
        contexts, active = config.list_kube_config_contexts(_kubeconfig())
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster is configured: {error}; set KUBECONFIG to a kubeconfig, as for kubectl"
        ) from None
    found = active if context is None else next((one for one in contexts if one["name"] == context), None)
    if found is None:
        there = ", ".join(one["name"] for one in contexts) or "none"
        raise UsageError(f"--context {context!r}: the kubeconfig has {there}")
    return str(found["context"].get("namespace") or "default")
