"""Imported by every process of a job while this folder is on its path: one thread of one process then waits in the middle
of a write to a durable tier, or of a send of a snapshot to another node.

HOLDFAST_TEST_POINT says of which, and at the how-manieth of its process: `write:2`. HOLDFAST_TEST_GATE is a folder with two
pipes: the one that waits says its number in `here`, and waits until somebody opens and closes `go`.
"""

import os
import socket
import threading

LARGE = 1 << 16
"""Rows are larger, heads and manifests are not."""

point, _, number = os.environ.get("HOLDFAST_TEST_POINT", "").partition(":")
gate = os.environ.get("HOLDFAST_TEST_GATE", "")
seen = 0


def half(call, data, *more):
    """Does the first half; the first of all processes that comes here then waits."""
    done = call(data[: len(data) // 2], *more)
    try:
        os.rename(f"{gate}/open", f"{gate}/taken")
    except FileNotFoundError:
        return done
    with open(f"{gate}/here", "w") as here:
        here.write(f"{os.getpid()}\n")
    with open(f"{gate}/go") as go:
        go.read()
    return done


def strikes(data, thread):
    """Whether this is the call that was meant."""
    global seen
    if len(data) < LARGE or thread not in threading.current_thread().name:
        return False
    seen += 1
    return seen == int(number)


if point == "write":
    write = os.write

    def halting_write(fd, data):
        if strikes(data, "holdfast-store"):
            return half(lambda piece: write(fd, piece), data)
        return write(fd, data)

    os.write = halting_write

if point == "send":
    send = socket.socket.send

    def halting_send(self, data, *flags):
        if strikes(data, "holdfast-snapshots-request"):
            return half(lambda piece, *more: send(self, piece, *more), data, *flags)
        return send(self, data, *flags)

    socket.socket.send = halting_send
