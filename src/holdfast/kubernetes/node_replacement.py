"""Asks for other machines in place of marked ones, in the way that the site names, and keeps a record of it.

The record is a ConfigMap beside the operator. It is written before anything is asked: an operator that is killed in between has
counted one too many, which is safe, and one too few would not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes import marks, replacement
from holdfast.kubernetes.api import Api, ApiError, Object
from holdfast.kubernetes.marks import Mark
from holdfast.kubernetes.replacement import (
    DeleteMachine,
    DeleteNodeClaim,
    Record,
    Replacements,
    RunCommand,
    SetLabel,
)
from holdfast.protocol.wire.decoding import decode

_log = logging.getLogger(__name__)
RECORD = "holdfast-replacements"
"""The ConfigMap's name."""
KEY = "records.json"
COMMAND_S = 60.0
"""For a site's program."""


class Held(Exception):
    """It is not asked for now. `until_s`: when it may be, in UTC; None: when something changes."""

    def __init__(self, why: str, until_s: float | None) -> None:
        super().__init__(why)
        self.until_s = until_s


class NodeReplacement:
    """One at a time, for the whole cluster; its caller sees to that."""

    def __init__(self, api: Api, namespace: str, wanted: Replacements, busy: Callable[[str], bool]) -> None:
        """namespace: the operator's. busy: whether a node of a job is on a machine."""
        self.way = wanted.way
        self._api, self._wanted, self._busy = api, wanted, busy
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"

    def due_s(self, mark: Mark | None) -> float | None:
        """When another machine is to be asked for, in UTC; None: never, or it was."""
        return replacement.due_s(mark, self._wanted.after_s)

    async def ask(self, node: Object) -> str:
        """Asks for another machine in place of a marked Node. Returns what was asked, or why it cannot be.

        Raises:
            Held: not now.
            ApiError, NoAnswer: it is to be tried again.
        """
        mark = marks.marks_of(node).mark
        assert mark is not None, "only a marked machine is replaced"
        name = node["metadata"]["name"]
        if not replacement.evicts_in_order(self.way) and self._busy(name):
            raise Held("nodes of jobs are there", None)
        try:
            await self._count(node, mark)
            told = await self._in_way(node, mark)
        except ApiError as error:
            # A right that is missing does not come by asking again.
            if error.status != 403:
                raise
            told = f"another machine cannot be asked for: {error}"
        _log.warning("%s", told, extra={"machine": name, "job": mark.job})
        return told[: replacement.WORDS]

    async def _count(self, node: Object, mark: Mark) -> None:
        """Writes the record, if the brake lets it."""
        now_s, uid = self._api.now_s(), node["metadata"]["uid"]
        try:
            there = await self._api.get(f"{self._folder}/{RECORD}")
        except ApiError as error:
            if error.status != 404:
                raise
            there = None
        records = _records(there)
        if any(one.uid == uid and one.at_s + replacement.DAY_S > now_s for one in records):
            return  # this operator, or one before it, did not come to the asking
        if (why := replacement.brake(records, self._wanted.most_a_day, now_s)) is not None:
            raise Held(why, replacement.free_again_s(records, self._wanted.most_a_day))
        new = Record(machine=node["metadata"]["name"], uid=uid, job=mark.job, reason=mark.reason, at_s=now_s)
        text = msgspec.json.encode(replacement.with_record(records, new)).decode()
        if there is None:
            metadata: Object = {"name": RECORD}
            made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: text}}
            await self._api.create(self._folder, made)
        else:
            # With the version: a leader that thaws overwrites nothing.
            metadata = {"resourceVersion": there["metadata"]["resourceVersion"]}
            await self._api.merge(f"{self._folder}/{RECORD}", {"metadata": metadata, "data": {KEY: text}})

    async def _in_way(self, node: Object, mark: Mark) -> str:
        name = node["metadata"]["name"]
        match self.way:
            case SetLabel(key, value) as way:
                await self._api.merge(f"/api/v1/nodes/{name}", replacement.labelled(way))
                return f"it has the label {key}={value}, so that it is replaced"
            case DeleteMachine() | DeleteNodeClaim() as way:
                return await self._delete_owner(way, node)
            case RunCommand(program):
                return await _run(program, name, mark)

    async def _delete_owner(self, way: DeleteMachine | DeleteNodeClaim, node: Object) -> str:
        owner = replacement.owner_of(way, node)
        if owner is None:
            whose = (
                "a Machine of Cluster API" if isinstance(way, DeleteMachine) else "a NodeClaim of Karpenter"
            )
            return f"another machine cannot be asked for: its Node does not name {whose}"
        called = f"{owner.plural}.{owner.group} {'/'.join(filter(None, (owner.namespace, owner.name)))}"
        try:
            group = await self._api.get(f"/apis/{owner.group}")
            path = owner.path(group["preferredVersion"]["version"])
            uid = owner.uid or (await self._api.get(path))["metadata"]["uid"]
            await self._api.delete(path, uid)
        except ApiError as error:
            # 409: another one has its name, so it is gone as well.
            if error.status not in (404, 409):
                raise
            return f"another machine cannot be asked for: {called} is not there ({error})"
        return f"{called} is deleted, so that it is replaced"


async def _run(program: str, machine: str, mark: Mark) -> str:
    """A site's program. Its last line is told."""
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            machine,
            mark.job,
            mark.reason,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # A group of its own: what it has started ends with it.
            process_group=0,
        )
    except OSError as error:
        return f"another machine cannot be asked for: {program}: {error.strerror}"
    try:
        async with asyncio.timeout(COMMAND_S):
            said, _ = await process.communicate()
    except TimeoutError:
        return f"another machine was asked for in vain: {program} did not end within {COMMAND_S:g} s"
    finally:
        if process.returncode is None:
            _end_group(process.pid)
            await process.wait()
    lines = said.decode(errors="replace").strip().splitlines()
    words = f": {lines[-1].strip()}" if lines else ""
    if process.returncode != 0:
        return f"another machine was asked for in vain: {program} ended with {process.returncode}{words}"
    return f"{program} was asked to replace it{words}"


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


_written = msgspec.json.Decoder(tuple[Record, ...])


def _records(there: Object | None) -> tuple[Record, ...]:
    text = ((there or {}).get("data") or {}).get(KEY, "[]")
    try:
        return decode(_written.decode, text, f"the ConfigMap {RECORD} cannot be read")
    except Damaged as error:
        # A person's edit. As if there were none, the brake would be lifted.
        raise Held(f"{error}; mend or delete it", None) from None
