"""The way to the API server: as a pod's service account, or as `kubectl` goes there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from holdfast.engines.kubernetes.api import Api
from holdfast.errors import UsageError

EXTRA = "holdfast-train[kubernetes]"


@asynccontextmanager
async def connect(context: str | None = None) -> AsyncIterator[Api]:
    """An API server. context: of the kubeconfig; None: its current one, or within a pod the pod's own account.

    Raises:
        UsageError: there is no way to one.
    """
    async with open_client(context) as transport:
        yield Api(transport)


@asynccontextmanager
async def open_client(context: str | None = None) -> AsyncIterator[Any]:
    """The `kubernetes_asyncio.client.ApiClient` of `connect`."""
    try:
        from kubernetes_asyncio import client, config
    except ModuleNotFoundError as error:
        # By the name of what is missing: it may be something that this library needs.
        raise UsageError(f"{error.name} is not installed: pip install '{EXTRA}'") from None
    try:
        # A kubeconfig that is named wins over the pod's own account: who sets KUBECONFIG within a pod means
        # another cluster.
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()
        else:
            await config.load_kube_config(context=context)
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no way to a cluster: {error}; name a kubeconfig in KUBECONFIG, as for kubectl"
        ) from None
    async with client.ApiClient() as transport:
        yield transport


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
        contexts, active = config.list_kube_config_contexts()
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no way to a cluster: {error}; name a kubeconfig in KUBECONFIG, as for kubectl"
        ) from None
    found = active if context is None else next((one for one in contexts if one["name"] == context), None)
    if found is None:
        there = ", ".join(one["name"] for one in contexts) or "none"
        raise UsageError(f"--context {context!r}: the kubeconfig has {there}")
    return str(found["context"].get("namespace") or "default")
