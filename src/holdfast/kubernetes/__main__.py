"""`python -m holdfast.kubernetes`: the operator. One of several acts, the holder of a Lease."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from typing import get_args

from holdfast import logs
from holdfast.errors import HoldfastError
from holdfast.kubernetes.client.api import ACCOUNT, Api, ApiError, connect
from holdfast.kubernetes.client.leader import Lease
from holdfast.kubernetes.names import COORDINATOR_PORT
from holdfast.kubernetes.objects.machine import GOING_CONDITIONS, TOPOLOGY_LABELS, Marking
from holdfast.kubernetes.pods.until_stopped import until_stopped
from holdfast.kubernetes.policy.machines import (
    ACCEPTED,
    AFTER_S,
    MOST_A_DAY,
    Replacements,
    Setting,
    Way,
    read_way,
)
from holdfast.kubernetes.tasks.operator import Operator
from holdfast.protocol.network.lookup import AddressLookup
from holdfast.protocol.network.sockets import raise_descriptor_limit

LEASE = "holdfast-operator"
OWN_NAMESPACE = ACCOUNT / "namespace"


def main() -> int | str:
    """Serves until SIGTERM, then returns 0. Returns an error message if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.kubernetes", description=__doc__)
    parser.add_argument("--namespace", help="namespace of its Lease; by default that of its own pod")
    parser.add_argument(
        "--watch",
        default="",
        metavar="NAMESPACE",
        help="namespace whose jobs are managed; by default all namespaces",
    )
    parser.add_argument(
        "--coordinator-image",
        default="",
        help="image of the coordinators; by default the image of each job's workers",
    )
    parser.add_argument("--coordinator-priority-class", default="")
    parser.add_argument("--python", default="python3", help="path of the Python interpreter in the images")
    parser.add_argument(
        "--topology-labels",
        default=",".join(TOPOLOGY_LABELS),
        metavar="A,B,...",
        help=(
            "labels of machines that give their location, from the outermost level to the innermost; by default "
            "those that clouds set, %(default)s"
        ),
    )
    parser.add_argument(
        "--going-conditions",
        default=",".join(GOING_CONDITIONS),
        metavar="A,B,...",
        help="conditions that mark a machine as sick, so that jobs leave it; by default %(default)s",
    )
    parser.add_argument(
        "--going-at-most",
        type=_percent,
        default=Setting().most_left_percent,
        metavar="PERCENT",
        help=(
            "largest share of the cluster's machines that jobs leave at the same time because of such a condition, "
            "in percent, %(default)s by default; one machine is always allowed"
        ),
    )
    parser.add_argument(
        "--mark",
        default="none",
        choices=get_args(Marking),
        help=(
            "what is set on a machine that a job found faulty: nothing (by default), a condition, or a condition and "
            "a taint"
        ),
    )
    parser.add_argument(
        "--mark-at-most",
        type=_percent,
        default=Setting().most_marked_percent,
        metavar="PERCENT",
        help=(
            "largest share of the cluster's machines that are marked at the same time, in percent, %(default)s by "
            "default; one machine is always allowed"
        ),
    )
    parser.add_argument(
        "--replace",
        type=_way,
        metavar="HOW",
        help=f"how to request a replacement for a machine that stays marked: {ACCEPTED}; by default none",
    )
    parser.add_argument(
        "--replace-after",
        type=_seconds,
        default=AFTER_S,
        metavar="SECONDS",
        help="how many seconds a machine must have been marked before it is replaced, %(default)g by default",
    )
    parser.add_argument(
        "--replace-at-most",
        type=_count,
        default=MOST_A_DAY,
        metavar="N",
        help="largest number of machines that are replaced in 24 hours, %(default)s by default",
    )
    parser.add_argument("--log", default="", metavar="LEVEL[,json]")
    given = parser.parse_args()
    if given.replace is not None and given.mark == "none":
        parser.error(
            "--replace needs --mark=condition or --mark=taint, because the request for a replacement is recorded in "
            "the machine's mark"
        )
    setting = Setting(
        namespace=given.namespace or _own_namespace(),
        coordinator_image=given.coordinator_image,
        coordinator_priority_class=given.coordinator_priority_class,
        python=given.python,
        topology_labels=_listed(given.topology_labels),
        going_conditions=_listed(given.going_conditions),
        most_left_percent=given.going_at_most,
        marking=given.mark,
        most_marked_percent=given.mark_at_most,
        replacements=None
        if given.replace is None
        else Replacements(way=given.replace, after_s=given.replace_after, most_a_day=given.replace_at_most),
    )
    raise_descriptor_limit()
    try:
        close_log = logs.configure(given.log, {})
    except HoldfastError as error:
        return f"[holdfast] {error}"
    try:
        asyncio.run(until_stopped(_serve(setting, given.watch)))
    except HoldfastError as error:
        return f"[holdfast] {error}"
    finally:
        close_log()
    return 0


async def _serve(setting: Setting, watch: str) -> None:
    # Unique for each process: after a restart in the same pod, a process must not take its predecessor's Lease for its own.
    identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    async with connect() as api:
        lease = Lease(api, setting.namespace, LEASE, identity)
        try:
            await _lead(lease, api, setting, watch)
        finally:
            # Only after everything that this process does as the leader has ended.
            await lease.release()


async def _lead(lease: Lease, api: Api, setting: Setting, watch: str) -> None:
    """Leads whenever the Lease is held. Each time starts with a new `Operator`, which reads everything from the API server."""
    while True:
        operator = Operator(api, setting, lambda host: AddressLookup(host, COORDINATOR_PORT), namespace=watch)
        try:
            await lease.lead(operator.run)
        except* ApiError as refusals:
            # Temporary errors are retried where they occur. What remains is a missing permission.
            first = next(_errors(refusals))
            raise HoldfastError(
                f"the API server refuses access that the operator needs ({first}); docs/kubernetes.md lists the "
                "required permissions"
            ) from first


def _errors(group: BaseException) -> Iterator[BaseException]:
    if isinstance(group, BaseExceptionGroup):
        for one in group.exceptions:
            yield from _errors(one)
    else:
        yield group


def _listed(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())


def _percent(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to 100")
    return int(text)


def _seconds(text: str) -> float:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of seconds, 0 or more")
    return float(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def _way(text: str) -> Way | None:
    try:
        return read_way(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError:
        return os.environ.get("POD_NAMESPACE") or Setting().namespace


if __name__ == "__main__":
    sys.exit(main())
