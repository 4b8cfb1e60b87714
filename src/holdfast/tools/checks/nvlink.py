"""NVLink: links that are there and not active."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition


class Links(msgspec.Struct, frozen=True):
    """The links of one GPU."""

    index: int
    model: str
    states: tuple[bool, ...]
    """Of every link that NVML knows of; others than True are down."""


def check_nvlink(task: Task) -> Iterator[CheckResult]:
    """Every link of every GPU. Nothing where there is no NVML or no link."""
    yield from judge_links(read_links())


def judge_links(gpus: Iterable[Links]) -> Iterator[CheckResult]:
    """Cards for PCIe report links that they do not have as down. If some are up there is a bridge, and nobody can tell."""
    for gpu in gpus:
        active, known = sum(gpu.states), len(gpu.states)
        card = "pcie" in gpu.model.lower()
        if not known or (card and not active):
            continue
        # A server board has all its links, so one that is down is faulty. A PCIe card may have a bridge to
        # one neighbour only, and which links that uses nobody writes down.
        condition = Condition.HEALTHY if active == known else Condition.UNKNOWN if card else Condition.FAULTY
        down = ", ".join(str(n) for n, up in enumerate(gpu.states) if not up)
        detail = f"down: {down}" if down else ""
        if down and card:
            detail += "; a PCIe card may not have them"
        yield CheckResult(
            name="nvlink",
            condition=condition,
            detail=detail,
            value=active,
            floor=known,
            unit="links",
            subject=f"gpu {gpu.index}",
            model=gpu.model,
        )


def read_links() -> list[Links]:
    """What NVML says. Raises CannotCheck when it fails; a machine without it has no links."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return []
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return []
        raise CannotCheck(f"NVML: {error}") from None
    try:
        return [_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise CannotCheck(f"NVML: {error}") from None
    finally:
        nvml.nvmlShutdown()


def _of(nvml: Any, index: int) -> Links:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    states = []
    # The first link that is not supported is the end of the list.
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                break  # there are no more
            raise
    name = nvml.nvmlDeviceGetName(handle)
    return Links(index, name.decode() if isinstance(name, bytes) else str(name), tuple(states))
