"""The operator as it is, in a process of its own. Its requests are counted, and SIGUSR1 writes the counts down."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from holdfast.kubernetes.client.api import Api, open_client
from holdfast.kubernetes.policy.machines import Setting
from holdfast.kubernetes.tasks.operator import Operator
from holdfast.protocol.network.lookup import FolderLookup, Lookup

_KIND = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/[^/]+)?/([a-z]+)")


class Counted:
    """Passes requests on. `counts`: by verb and kind."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.counts: Counter[str] = Counter()

    async def call_api(self, resource_path: str, method: str, **options: Any) -> Any:
        found = _KIND.match(resource_path)
        watch = any(name == "watch" for name, _ in options.get("query_params", ()))
        self.counts[f"{'WATCH' if watch else method} {found[1] if found else resource_path}"] += 1
        return await self._transport.call_api(resource_path, method, **options)


async def operate(folder: Path) -> None:
    """folder: has a link to each coordinator's folder, by its pod's address."""

    def lookup(address: str) -> Lookup:
        return FolderLookup(folder / "coordinators" / address)

    async with open_client() as transport:
        counted = Counted(transport)

        def tell() -> None:
            work = folder / "requests.work"
            work.write_text(json.dumps(counted.counts))
            work.replace(folder / "requests.json")

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, tell)
        tell()  # from now on it can be asked
        running = asyncio.create_task(Operator(Api(counted), Setting(), lookup).run())
        loop.add_signal_handler(signal.SIGTERM, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            pass


if __name__ == "__main__":
    asyncio.run(operate(Path(sys.argv[1])))
