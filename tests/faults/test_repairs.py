"""What an agent repairs itself, with a stand-in for the driver's tool."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.agent.checks import Repairs
from holdfast.protocol import messages as m
from holdfast.protocol.health import Remedy

ORDER = m.Repair(1, Remedy.RESET_DEVICE, "GPU-7", "xid-95")


@pytest.fixture
def tool(tmp_path):
    """Says how it was called; ends as told."""

    def make(code: int) -> str:
        path = tmp_path / "nvidia-smi"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho GPU in use\nexit {code}\n')
        path.chmod(0o755)
        return str(path)

    return make


def answers(*orders: m.Repair, shared: bool = False, tool: str = "no-such-tool") -> list[m.Repaired]:
    said: list[m.Repaired] = []

    async def run() -> None:
        repairs = Repairs(shared, said.append, tool)
        for order in orders:
            await repairs.answer(order)

    asyncio.run(run())
    return said


def test_a_device_is_reset_once_however_often_it_is_ordered(tool, tmp_path):
    assert answers(ORDER, ORDER, tool=tool(0)) == [m.Repaired(1), m.Repaired(1)]
    assert (tmp_path / "calls").read_text() == "--gpu-reset -i GPU-7\n"


def test_a_tool_that_fails_is_quoted(tool):
    [said] = answers(ORDER, tool=tool(19))
    assert said.error is not None
    assert said.error.endswith("ended with exit code 19: GPU in use")


def test_what_cannot_be_done_is_said():
    assert "no-such-tool was not found" in str(answers(ORDER)[0].error)
    assert "shares its machine" in str(answers(ORDER, shared=True)[0].error)
    assert "cannot carry out reboot" in str(answers(m.Repair(2, Remedy.REBOOT))[0].error)
