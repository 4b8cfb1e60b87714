"""Makes a coordinator hang on a signal: SIGUSR1, busy for ever; SIGUSR2, waiting for a lock for ever. In front of the
path of Python's modules."""

import signal
import sys
import threading


def spin(number: int, frame: object) -> None:
    while True:
        pass


def wait(number: int, frame: object) -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


if "holdfast.coordinator" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, spin)
    signal.signal(signal.SIGUSR2, wait)
