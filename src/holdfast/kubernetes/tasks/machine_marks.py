"""Writes marks on Nodes, one at a time for the whole cluster: otherwise two jobs could each use the last mark that the limit
allows.

If the site configures it, a replacement is requested for a machine that has been marked for a while. The requests are recorded in
a ConfigMap beside the operator, each before it is sent: an operator that is killed in between has counted one too many, which is
safe, while one too few would not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoApiAnswer, Object
from holdfast.kubernetes.objects.machine import (
    MachineSeen,
    Mark,
    Marking,
    lags_behind,
    mark_note,
    mark_patches,
    mark_status,
    marks_of,
)
from holdfast.kubernetes.policy.machines import (
    DAY_S,
    REPLACEMENT_CHARS,
    DeleteMachine,
    DeleteNodeClaim,
    ReplacementRecord,
    Replacements,
    RunProgram,
    SetLabel,
    evicts_in_order,
    free_again_s,
    label_back,
    label_for,
    owner_of,
    replacement_due_s,
    why_not_marked,
    why_not_replaced,
    with_record,
)
from holdfast.protocol.wire.decoding import decode

_log = logging.getLogger(__name__)
FOLDER = "/api/v1/nodes"

RECORD = "holdfast-replacements"
"""The ConfigMap's name."""
KEY = "records.json"
COMMAND_S = 60.0
"""Seconds that a site's program may take."""


class NodeMarks:
    """The marks on the cluster's Nodes. Jobs' tasks call `put` and `take_back`; `run` updates conditions and taints accordingly.

    Attributes:
        refused: why the API server accepts no marks; None: it does.
    """

    def __init__(
        self,
        api: Api,
        machines: Mapping[str, MachineSeen],
        saw: Callable[[Object], None],
        marking: Marking,
        most_percent: int,
        replaces: NodeReplacement | None = None,
    ) -> None:
        """Takes the machines of the whole cluster.

        Args:
            saw: takes in the Node that a request returned.
            most_percent: percentage of the machines that may be marked at once.
            replaces: how marked machines are replaced; None: they are not.
        """
        self._api, self._machines, self._saw = api, machines, saw
        self._marking: Marking = marking
        self._most_percent = most_percent
        self._replaces = replaces
        self._held_until_s: dict[str, float | None] = {}
        self._one_at_a_time = asyncio.Lock()
        self._awake = asyncio.Event()
        self.refused: str | None = None

    def wake(self) -> None:
        """Has `run` look, since a Node has changed or a pod on one has gone."""
        self._awake.set()

    async def put(self, machine: str, mark: Mark) -> None:
        """Marks a machine, if the limit allows it. Raises ApiError and NoApiAnswer."""
        async with self._one_at_a_time:
            seen = self._machines.get(machine)
            # Checked again, because another job may have marked a machine since this was decided. The next look of this job's
            # task reports that.
            if seen is None or (self._held() if seen.marks.mark is None else seen.marks.mark.uid != mark.uid):
                return
            _log.warning("marks a machine: %s", mark.reason, extra={"machine": machine, "job": mark.job})
            await self._write(machine, mark)

    async def take_back(self, machine: str, uid: str) -> None:
        """Removes a machine's mark, if it is this job's. Raises ApiError and NoApiAnswer."""
        async with self._one_at_a_time:
            seen = self._machines.get(machine)
            if seen is None or seen.marks.mark is None or seen.marks.mark.uid != uid:
                return
            _log.info("takes a mark back", extra={"machine": machine, "job": seen.marks.mark.job})
            await self._write(machine, None)

    async def _write(self, machine: str, mark: Mark | None) -> None:
        try:
            self._saw(await self._api.merge(f"{FOLDER}/{machine}", mark_note(mark)))
        except ApiError as error:
            # A missing permission must not stop anything, since jobs avoid the machine by themselves.
            if error.status == 403:
                self.refused = f"machines may not be marked: {error}"
                _log.warning("%s", self.refused)
            elif error.status != 404:
                raise

    def _held(self) -> bool:
        there = {name: one.marks for name, one in self._machines.items()}
        return why_not_marked(there, self._most_percent) is not None

    async def run(self) -> None:
        """Updates conditions and taints, and requests replacements, until cancelled or refused."""
        backoff = Backoff()
        while self.refused is None:
            await self._rest()
            try:
                for machine in [
                    one for one in self._machines.values() if lags_behind(one.marks, self._marking)
                ]:
                    await self._follow(machine.name)
                for name in self._due():
                    await self._replace(name)
                backoff.reset()
            except (ApiError, NoApiAnswer) as error:
                _log.warning("a mark is not shown on its machine: %s; it is tried again", error)
                await backoff.wait(error)
                self.wake()

    async def _rest(self) -> None:
        """Waits until a Node changes, or the replacement of a machine is due."""
        moments = [at_s for machine in self._machines if (at_s := self._due_s(machine)) is not None]
        rest_s = max(0.0, min(moments) - self._api.now_s()) if moments else None
        try:
            async with asyncio.timeout(rest_s):
                await self._awake.wait()
        except TimeoutError:
            return
        self._awake.clear()
        # What held up a replacement without a known end may be over.
        self._held_until_s = {name: at_s for name, at_s in self._held_until_s.items() if at_s is not None}

    async def _follow(self, machine: str) -> None:
        path = f"{FOLDER}/{machine}"
        way = self._replaces.way if self._replaces is not None else None
        try:
            node = await self._api.get(path)
            back = label_back(way, node) if way is not None else None
            if marks_of(node).mark is None and back is not None:
                node = await self._api.merge(path, back)
            for below, patch in mark_patches(node, self._marking, time.time()):
                write = self._api.strategic if below else self._api.merge
                self._saw(await write(path + below, patch))
        except ApiError as error:
            if error.status == 403:
                self.refused = f"marks may not be shown on machines: {error}"
                _log.warning("%s", self.refused)
            elif error.status == 409:  # it has changed in the meantime, and is read again
                self.wake()
            elif error.status != 404:
                raise

    # ------------------------------------------------------------ another machine in its place

    def _due_s(self, machine: str) -> float | None:
        """When its replacement is due, in UTC, or can be tried again; None: never, or that is not known."""
        seen = self._machines.get(machine)
        if self._replaces is None or seen is None:
            return None
        due_s = self._replaces.due_s(seen.marks.mark)
        if due_s is None or machine not in self._held_until_s:
            return due_s
        held_s = self._held_until_s[machine]
        return None if held_s is None else max(due_s, held_s)

    def _due(self) -> list[str]:
        now_s = self._api.now_s()
        return [name for name in self._machines if (at_s := self._due_s(name)) is not None and at_s <= now_s]

    async def _replace(self, machine: str) -> None:
        assert self._replaces is not None, "nothing is due without it"
        path = f"{FOLDER}/{machine}"
        try:
            node = await self._api.get(path)
            if self._replaces.due_s(marks_of(node).mark) is None:
                self._saw(node)
                return
            # Without the lock: a site's program may take a minute, while jobs wait for their marks.
            outcome = await self._replaces.ask(node)
            async with self._one_at_a_time:
                node = await self._api.get(path)
                if (mark := marks_of(node).mark) is None:  # taken back meanwhile
                    self._saw(node)
                    return
                mark = msgspec.structs.replace(mark, replacement=outcome)
                self._saw(await self._api.merge(path, mark_note(mark)))
                # Its condition may not be set yet.
                held = marks_of(node).condition
                shown = mark_status(mark, self._api.now_s(), changed=not held)
                self._saw(await self._api.strategic(f"{path}/status", shown))
        except Held as why:
            _log.warning("no other machine is asked for: %s", why, extra={"machine": machine})
            self._held_until_s[machine] = why.until_s
        except ApiError as error:
            if error.status != 404:
                raise
            # It is gone, and the watch will report that. If it stayed due until then, it would be tried again without a pause.
            self._held_until_s[machine] = None


class NodeReplacement:
    """Requests replacements of machines. The caller makes sure that there is one request at a time for the whole cluster."""

    def __init__(self, api: Api, namespace: str, wanted: Replacements, busy: Callable[[str], bool]) -> None:
        """namespace: the operator's. wanted: the site's configuration. busy: whether a node of a job is on a machine."""
        self.way = wanted.way
        self._api, self._wanted, self._busy = api, wanted, busy
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"

    def due_s(self, mark: Mark | None) -> float | None:
        """When a replacement is to be requested, in UTC; None: never, or it has been."""
        return replacement_due_s(mark, self._wanted.after_s)

    async def ask(self, node: Object) -> str:
        """Requests a replacement for a marked Node. Returns what was requested, or why that is impossible.

        Raises:
            Held: it may not be requested now.
            ApiError, NoApiAnswer: it should be tried again.
        """
        mark = marks_of(node).mark
        assert mark is not None, "only a marked machine is replaced"
        name = node["metadata"]["name"]
        if not evicts_in_order(self.way) and self._busy(name):
            raise Held("nodes of jobs are there", None)
        try:
            await self._count(node, mark)
            outcome = await self._in_way(node, mark)
        except ApiError as error:
            # Repeating the request does not help against a missing permission.
            if error.status != 403:
                raise
            outcome = f"another machine cannot be asked for: {error}"
        _log.warning("%s", outcome, extra={"machine": name, "job": mark.job})
        return outcome[:REPLACEMENT_CHARS]

    async def _count(self, node: Object, mark: Mark) -> None:
        """Records the request, if the daily limit allows it. Raises Held if it does not."""
        now_s, uid = self._api.now_s(), node["metadata"]["uid"]
        try:
            there = await self._api.get(f"{self._folder}/{RECORD}")
        except ApiError as error:
            if error.status != 404:
                raise
            there = None
        records = _records(there)
        if any(one.uid == uid and one.at_s + DAY_S > now_s for one in records):
            return  # recorded before by this operator or an earlier one, which did not get as far as the request
        if (why := why_not_replaced(records, self._wanted.most_a_day, now_s)) is not None:
            raise Held(why, free_again_s(records, self._wanted.most_a_day))
        new = ReplacementRecord(
            machine=node["metadata"]["name"], uid=uid, job=mark.job, reason=mark.reason, at_s=now_s
        )
        text = msgspec.json.encode(with_record(records, new)).decode()
        if there is None:
            metadata: Object = {"name": RECORD}
            made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: text}}
            await self._api.create(self._folder, made)
        else:
            # With the version, so that a former leader that was suspended and resumed overwrites nothing.
            metadata = {"resourceVersion": there["metadata"]["resourceVersion"]}
            await self._api.merge(f"{self._folder}/{RECORD}", {"metadata": metadata, "data": {KEY: text}})

    async def _in_way(self, node: Object, mark: Mark) -> str:
        name = node["metadata"]["name"]
        match self.way:
            case SetLabel(key, value) as way:
                await self._api.merge(f"/api/v1/nodes/{name}", label_for(way))
                return f"it has the label {key}={value}, so that it is replaced"
            case DeleteMachine() | DeleteNodeClaim() as way:
                return await self._delete_owner(way, node)
            case RunProgram(program):
                return await _run(program, name, mark)

    async def _delete_owner(self, way: DeleteMachine | DeleteNodeClaim, node: Object) -> str:
        owner = owner_of(way, node)
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
            # 409: another object has its name, so it is gone in this case too.
            if error.status not in (404, 409):
                raise
            return f"another machine cannot be asked for: {called} is not there ({error})"
        return f"{called} is deleted, so that it is replaced"


class Held(Exception):
    """A replacement may not be requested now. `until_s`: when it may be, in UTC; None: when something changes."""

    def __init__(self, why: str, until_s: float | None) -> None:
        super().__init__(why)
        self.until_s = until_s


async def _run(program: str, machine: str, mark: Mark) -> str:
    """Runs a site's program. Returns what happened, with the last line that the program printed."""
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            machine,
            mark.job,
            mark.reason,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # In a process group, so that the processes it has started end with it.
            process_group=0,
        )
    except OSError as error:
        return f"another machine cannot be asked for: {program}: {error.strerror}"
    try:
        async with asyncio.timeout(COMMAND_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return f"another machine was asked for in vain: {program} did not end within {COMMAND_S:g} s"
    finally:
        if process.returncode is None:
            _end_group(process.pid)
            await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    last_line = f": {lines[-1].strip()}" if lines else ""
    if process.returncode != 0:
        return f"another machine was asked for in vain: {program} ended with {process.returncode}{last_line}"
    return f"{program} was asked to replace it{last_line}"


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


_written = msgspec.json.Decoder(tuple[ReplacementRecord, ...])


def _records(there: Object | None) -> tuple[ReplacementRecord, ...]:
    text = ((there or {}).get("data") or {}).get(KEY, "[]")
    try:
        return decode(_written.decode, text, f"the ConfigMap {RECORD} cannot be read")
    except Damaged as error:
        # Somebody has edited it. If it counted as empty, the daily limit would be lifted.
        raise Held(f"{error}; mend or delete it", None) from None
