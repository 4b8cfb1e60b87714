"""The way to the API server: as a pod's service account, or as `kubectl` goes there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.engines.kubernetes.api import Api
from holdfast.errors import UsageError

EXTRA = "holdfast-train[kubernetes]"


@asynccontextmanager
async def connect(context: str | None = None) -> AsyncIterator[Api]:
    """An API server. context: of the kubeconfig; None: its current one, or within a pod the pod's own account.

    Raises:
        UsageError: there is no way to one.
    """
    try:
        from kubernetes_asyncio import client, config
    except ModuleNotFoundError:
        raise UsageError(f"kubernetes_asyncio is not installed: pip install '{EXTRA}'") from None
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
        yield Api(transport)
