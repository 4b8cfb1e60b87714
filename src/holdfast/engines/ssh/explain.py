"""Explains what is wrong with a host, in one sentence that names it and says what to do. Pure."""

from __future__ import annotations

from holdfast.engines.ssh.words import Greeting

_MARKS = (
    (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
        "its host key has changed; find out why, then remove the old key with `ssh-keygen -R {name}`",
    ),
    (
        ("Host key verification failed", "host key is known"),
        "its host key is not known here; connect once with `ssh {name}` and compare the fingerprint",
    ),
    (
        ("Permission denied", "Too many authentication failures"),
        "it refused the key; `ssh {name}` must work without asking for a password (see ssh-copy-id and ssh-agent)",
    ),
    (
        ("Could not resolve hostname", "Name or service not known"),
        "ssh does not know this name; correct --hosts, or add a HostName for it to ~/.ssh/config",
    ),
    (
        ("Connection refused",),
        "nothing listens for ssh there; start sshd on it, or correct its Port in ~/.ssh/config",
    ),
    (
        ("timed out", "No route to host", "Network is unreachable", "Connection closed", "Connection reset"),
        "it cannot be reached; is it running, and does `ssh {name}` work?",
    ),
    (
        ("No module named 'holdfast.engines.ssh'", "No module named holdfast.engines.ssh"),
        "it has a different version of Holdfast; install version {version} in {python}",
    ),
    (
        ("No module named",),
        "its Python environment is incomplete ({last}); install the same environment as on this machine",
    ),
)
_NO_PYTHON = (
    "there is no Python at {python}; install the same environment at the same path, or specify its Python with "
    "--remote-python"
)


def failure(name: str, code: int | None, stderr: str, python: str, version: str) -> str:
    """Explains a connection that ended before the host's greeting.

    Args:
        name: the host's.
        code: ssh's exit code, which is that of the remote command unless it is 255.
        stderr: what ssh printed.
        python: the interpreter that should have run there.
        version: Holdfast's on this machine.
    """
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    fields = {"name": name, "python": python, "version": version, "last": last}
    # Checked first, because the shell's exit codes for a missing program are certain, while stderr may contain anything that a
    # login prints.
    if code in (126, 127):
        return f"{name}: {_NO_PYTHON.format(**fields)}"
    for marks, explanation in _MARKS:
        if any(mark in stderr for mark in marks):
            return f"{name}: {explanation.format(**fields)}"
    return f"{name}: ssh ended with exit code {code}{f' ({last})' if last else ''}; try `ssh {name}`"


def mismatch(name: str, theirs: Greeting, ours: Greeting, python: str) -> str | None:
    """Why a host's environment cannot take part; None: it can."""
    # The versions must be equal and not just compatible: nodes exchange messages and tensors, and a job with two versions would
    # fail during a step instead of at its start.
    for what, there, here in (
        ("Holdfast", theirs.version, ours.version),
        ("Python", theirs.python, ours.python),
        ("torch", theirs.torch, ours.torch),
    ):
        if there != here:
            return (
                f"{name}: {what} is {there or 'missing'} in {python} there, but {here or 'missing'} on this machine; "
                "install the same environment on both"
            )
    return None
