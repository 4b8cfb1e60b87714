"""The kernel's log: /dev/kmsg from where reading stopped last time, a file that stands in for it, or the journal.

Only records that the kernel itself wrote are used. A program that may write to /dev/kmsg can put any line there, but
the kernel marks it with a facility other than its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Damaged
from holdfast.health.samples import LogLine
from holdfast.protocol.wire.decoding import decode

SOURCE = "kmsg"
RECORD_BYTES = 8192
"""A record of /dev/kmsg is at most this long (the kernel's CONSOLE_EXT_LOG_MAX)."""
BATCH = 500
"""Records read at a time, so that a flooded log does not block the agent's loop."""
JOURNAL_BYTES = 1 << 16
"""The longest entry of the journal that is read. A longer entry is not judged at all."""
KERNEL_FACILITY = 0
"""Syslog's number for the kernel. A line that a program writes into /dev/kmsg never has it."""
SPEAKER = re.compile(r"[A-Za-z][\w.-]*(?: \S+)?: ")
"""The prefix of a kernel line that names the subsystem or driver, in some with its device (`NVRM: `, `nvme nvme0: `)."""
_RECORD = re.compile(r"(\d+),(\d+),(\d+),[^;]*;")


class KernelRecord(NamedTuple):
    """One record of the kernel's log."""

    sequence: int
    uptime_s: float
    """Its time, on the clock of `time.monotonic`."""
    text: str
    facility: int = KERNEL_FACILITY
    """The writer, as a facility of syslog."""


def parse_record(data: bytes) -> KernelRecord | None:
    """Parses one record of /dev/kmsg: `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;text`, then lines with fields. None: it is
    not such a record."""
    text = data.decode(errors="replace").split("\n", 1)[0]
    match = _RECORD.match(text)
    if match is None:
        return None
    # The first number is facility times eight plus level. The kernel refuses facility 0 to writers of
    # /dev/kmsg, so it proves who wrote the line.
    return KernelRecord(
        int(match[2]), int(match[3]) / 1e6, _unescape(text[match.end() :]), int(match[1]) >> 3
    )


def format_record(sequence: int, text: str, priority: int = 3) -> bytes:
    """A record as the kernel would show it, stamped now. priority: 3 is `err`."""
    shown = re.sub(r"[^ -~]|\\", lambda m: "".join(f"\\x{b:02x}" for b in m[0].encode()), text)
    return f"{priority},{sequence},{int(time.monotonic() * 1e6)},-;{shown}\n".encode()


def _unescape(text: str) -> str:
    # The kernel writes control characters, backslashes and bytes above 126 as \xNN. Undone, so that patterns may
    # match names of devices as they are; a newline within a record comes back, and `log_matching` splits there.
    if "\\x" not in text:
        return text
    data = re.sub(rb"\\x([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), text.encode(errors="replace"))
    return data.decode(errors="replace")


def _line(record: KernelRecord) -> LogLine:
    # Never negative: the kernel stamps with local_clock, which may run ahead of CLOCK_MONOTONIC by a little.
    return LogLine(SOURCE, record.text, age_s=max(0.0, time.monotonic() - record.uptime_s))


class Kmsg:
    """/dev/kmsg as a descriptor that is readable when there is something to read.

    left: a file that keeps the boot id and the sequence number, so that an agent that is restarted continues from
    there. The first agent begins with what the kernel logs from now on (what it logged before is for the checks of a
    new node).
    """

    def __init__(self, path: Path = Path("/dev/kmsg"), left: Path | None = None) -> None:
        """Raises OSError when it cannot be read."""
        self._left = left
        self._boot = boot_id()
        self._after = self._read_left()
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # From the first record that the kernel still has, if an agent before read some of it: what came
            # between the two agents must not be lost. `_after` skips what was judged already.
            os.lseek(self._fd, 0, os.SEEK_SET if self._after is not None else os.SEEK_END)
        except OSError:
            os.close(self._fd)
            raise
        self.overrun = 0

    def fileno(self) -> int:
        """The descriptor, for the event loop."""
        return self._fd

    def lines(self) -> list[LogLine]:
        """The lines that are available now. Records that the kernel overwrote before they were read are counted in
        `overrun` and skipped."""
        lines = []
        last = None
        for _ in range(BATCH):
            try:
                data = self._read()
            except BlockingIOError:
                break
            except OSError as error:
                # The ring buffer was overwritten faster than it was read. The descriptor now stands at the
                # oldest record that is left, and reading goes on there.
                if error.errno == errno.EPIPE:
                    self.overrun += 1
                    continue
                raise
            record = parse_record(data)
            # Sequence numbers begin again with each boot; `_read_left` compares the boot, so this number is
            # of this one.
            if record is None or (self._after is not None and record.sequence <= self._after):
                continue
            last = record.sequence
            # Anybody who may write to /dev/kmsg could otherwise have a node replaced with one echo.
            if record.facility == KERNEL_FACILITY:
                lines.append(_line(record))
        if last is not None:
            self._after = last
            self._write_left()
        return lines

    def _read(self) -> bytes:
        return os.read(self._fd, RECORD_BYTES)

    def trouble(self) -> str:
        """Why no more lines arrive; empty: as far as this process can tell, they may."""
        return ""

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._fd)

    def _read_left(self) -> int | None:
        try:
            boot, _, sequence = self._left.read_text().partition(" ") if self._left else ("", "", "")
        except (OSError, UnicodeDecodeError):
            return None
        return int(sequence) if boot == self._boot and sequence.isdigit() else None

    def _write_left(self) -> None:
        if self._left is None:
            return
        # Replaced, not rewritten: if the agent is killed in between, the file has the old number or the new
        # one, never a part. With a number that is too old, lines are only judged twice, which bursts absorb.
        work = self._left.with_suffix(".tmp")
        try:
            work.write_text(f"{self._boot} {self._after}")
            work.replace(self._left)
        except OSError:
            return  # a full disk is no reason not to listen


class KmsgFile:
    """A file with records in the format of /dev/kmsg, which others append to; changes are reported by inotify."""

    def __init__(self, path: Path) -> None:
        """Creates the file if it does not exist; starts at its end."""
        path.touch()
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def lines(self) -> list[LogLine]:
        """The records that were appended since the last call. A record is complete with its newline."""
        data = self._rest + self._file.read()
        # The writer may be in the middle of a record.
        whole, newline, self._rest = data.rpartition(b"\n")
        records = (parse_record(r) for r in whole.split(b"\n")) if newline else ()
        return [_line(r) for r in records if r is not None and r.facility == KERNEL_FACILITY]

    def close(self) -> None:
        """Closes the descriptor."""
        self._file.close()


class Journal:
    """The kernel's lines from the systemd journal, for users that may read it but not /dev/kmsg."""

    def __init__(self) -> None:
        """Raises OSError when there is no journalctl, or it does not start."""
        command = shutil.which("journalctl")
        if command is None:
            raise FileNotFoundError(errno.ENOENT, "journalctl was not found")
        self._process = subprocess.Popen(
            # JSON, see `journal_text`. `--lines=0`: only what comes from now on, as with /dev/kmsg.
            [command, "--dmesg", "--follow", "--lines=0", "--output=json", "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor, for the event loop."""
        return self._out.fileno()

    def lines(self) -> list[LogLine]:
        """The lines since the last call. Raises EOFError when journalctl has ended."""
        try:
            data = os.read(self._out.fileno(), JOURNAL_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError(f"journalctl ended with exit code {self._process.wait()}")
        whole, _, rest = (self._rest + data).rpartition(b"\n")
        # Bounded: an entry may be as large as its writer likes. An entry that is cut off is no longer valid
        # JSON and is left out.
        self._rest = rest[-JOURNAL_BYTES:]
        texts = (journal_text(entry) for entry in whole.split(b"\n"))
        return [LogLine(SOURCE, text) for text in texts if text is not None]

    def trouble(self) -> str:
        """Why no more lines arrive; empty: as far as this process can tell, they may."""
        if (code := self._process.poll()) is not None:
            return f"journalctl ended with exit code {code}"
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
        return "journalctl is stopped" if state in ("T", "t") else ""

    def close(self) -> None:
        """Ends journalctl."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._out.close()


def journal_text(entry: bytes) -> str | None:
    """The kernel's message in one entry as `journalctl --output=json` writes it; None: the entry is not a message of
    the kernel.

    Plain output would not do: the name of a process may contain a newline, and the rest of the message would pass for a
    line of its own. A message that is not plain text comes as a list of its bytes.
    """
    try:
        fields = decode(json.loads, entry, "an entry of the journal")
    except Damaged:
        return None
    # Fields that begin with an underscore are journald's own and cannot be set by a program. Both are asked
    # for: `--dmesg` selects the transport, and a user's line in /dev/kmsg has it too, but another facility.
    if not isinstance(fields, dict) or fields.get("_TRANSPORT") != "kernel":
        return None
    if fields.get("SYSLOG_FACILITY") != str(KERNEL_FACILITY):
        return None
    message = fields.get("MESSAGE")
    if isinstance(message, list) and all(isinstance(b, int) and 0 <= b < 256 for b in message):
        return bytes(message).decode(errors="replace")
    return message if isinstance(message, str) else None


_STAMP = re.compile(
    r"""(?x)
    (?:<\d+>)?                                               # a level, as pstore and serial consoles keep it
    (?:
        [A-Z][a-z]{2}\ +\d{1,2}\ \d\d:\d\d:\d\d(?:\.\d+)?\ (?:\S+\ )?kernel:\ ?      # syslog, journalctl
      | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,:+Z-]*\ (?:\S+\ )?kernel:\ ?           # the same with ISO dates
      | kernel:\ ?
    )?
    (?:\[\ *\d+\.\d{3,9}\](?:\[\ *[TC]\d+\])?\ ?            # seconds since the boot, of which thread or processor
      | \[[A-Z][a-z]{2}\ [A-Z][a-z]{2}\ +\d{1,2}\ \d\d:\d\d:\d\d\ \d{4}\]\ ?  # dmesg -T
      | \[[A-Z][a-z]{2}\ *\d{1,2}\ \d\d:\d\d\]\ ?|\[\ *\+\d+\.\d+\]\ ?)?  # dmesg -H
    """
)
_CONTAINER = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:stdout|stderr) [FP] ")
"""The prefix that a container runtime writes before each line (Kubernetes' CRI log format)."""


def printed_lines(text: str) -> list[str]:
    """The kernel's messages in text that a person copied: from `dmesg` (also `-T`), syslog, `journalctl` (also `-o
    json`), /dev/kmsg itself, a container's log, or bare. One string per record; lines that belong to one record are
    separated by newlines."""
    found: list[str] = []
    for line in text.splitlines():
        line = _CONTAINER.sub("", line, count=1)
        if line.startswith("{") and (message := journal_text(line.encode())) is not None:
            found.append(message)
        elif (record := parse_record(line.encode())) is not None:
            found.append(record.text)
        # dmesg puts the later lines of a record under the first one's text, and its time stamp nowhere.
        elif found and line.startswith("  ") and (rest := line.strip()) and SPEAKER.match(rest):
            found[-1] += "\n" + rest
        elif stripped := _STAMP.sub("", line.strip(), count=1).rstrip():
            found.append(stripped)
    return found


def open_kernel_log(left: Path | None) -> Kmsg | Journal:
    """Opens the kernel's log by the best method that this user has permission for.

    Raises:
        OSError: no method works; the message says why, and what would help.
    """
    try:
        return Kmsg(left=left)
    except OSError as error:
        try:
            # Checked before it is started: without permission journalctl neither fails nor ends, so the node
            # would seem watched while no line ever arrives.
            if os.geteuid() != 0 and not _may_read_journal():
                raise PermissionError(errno.EACCES, "no permission for the journal")
            return Journal()
        except OSError as other:
            raise OSError(
                error.errno,
                f"/dev/kmsg: {error.strerror}; journal: {other.strerror}. Kernel and GPU errors (Xid) are not seen "
                "on this node. Add the agent's user to the group systemd-journal or adm, give it CAP_SYSLOG, or set "
                "kernel.dmesg_restrict=0",
            ) from None


def _may_read_journal() -> bool:
    """Whether this user may read a file of the journal. journalctl itself prints nothing, and waits for ever, if none
    may be read."""
    for folder in (Path("/var/log/journal"), Path("/run/log/journal")):
        if any(os.access(file, os.R_OK) for file in folder.glob("*/system.journal")):
            return True
    return False


def boot_id() -> str:
    """The kernel's own id of this boot, the same in every container; empty: it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
