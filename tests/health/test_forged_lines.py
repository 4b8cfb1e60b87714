"""What a user without any right can make the kernel write takes no node out of the job.

The kernel begins some of its lines with the name of a process, 15 characters that a process gives itself, and puts names
of files and control groups further on.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import selectors
import signal
import time
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.health.kmsg import Kmsg, KmsgFile, format_record, journal_text
from holdfast.health.log_matching import NAME_CHARS, begins_with_a_name, literals
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.rules import Rule, make_rule
from holdfast.health.ruleset import RuleSet, catalogue
from holdfast.health.samples import LogLine
from holdfast.protocol.health import Remedy, acts_on_node

RULES = list(catalogue())
SEVERE = [r for r in RULES if r.source == "kmsg" and r.pattern and acts_on_node(r.remedy)]
PATTERNS = {r.pattern: r for r in reversed(SEVERE)}
NAMES = ("Kernel panic", "Oops: ", "EDAC MC0: 1 UE ", "a\nKernel panic")
PR_SET_NAME = 15

FORMS = (  # {name}: 15 characters of a user's; {free}: a file's, a library's or a control group's name
    "{name}[30239]: segfault at 8 ip 00007ffac5374219 sp 00007ffdc10427a8 error 4 in {free}[156219,7ffac5244000+156000]",
    "{name}[30239]: unhandled signal 11 code 0x1 at 0x0000000000000008 in {free}[aaaa+1000]",
    "{name}[30239]: unhandled exception: DABT (lower EL), ESR 0x92000006, level 2 translation fault in {free}[a+1000]",
    "{name}[30239]: bad frame in rt_sigreturn frame:00 ip:00 sp:00 orax:0 in {free}[a+1000]",
    "{name}[30239] general protection fault ip:7f sp:7f error:0 in {free}[a+1000]",
    "{name}[30239] vsyscall attempted with vsyscall=none ip:ffffffffff600000 cs:33",
    "traps: {name}[30239] general protection fault ip:7f sp:7f error:0 in {free}[a+1000]",
    "traps: {name}[30239] trap invalid opcode ip:7f sp:7f error:0 in {free}[a+1000]",
    "{name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "{name}: page allocation failure: order:3, mode:0xcc0(GFP_KERNEL), nodemask=(null),cpuset={free},mems_allowed=0",
    "{name}: vmalloc error: size 4096, page order 0, failed to allocate pages, mode:0x0, nodemask=(null),cpuset={free}",
    "{name}: attempt to access beyond end of device",
    "{name}: potentially unexpected fatal signal 11.",
    "{name} (30239): drop_caches: 3",
    "{name} (30239) used greatest stack depth: 11384 bytes left",
    "{name}(30239): unaligned access to 0x1, ip=0x2 in {free}",
    "{name} uses obsolete (PF_INET,SOCK_PACKET)",
    "CPU: 1 UID: 1000 PID: 30239 Comm: {name} Not tainted 6.18.44 #1",
    "Out of memory: Killed process 30239 ({name}) total-vm:1kB, anon-rss:1kB, file-rss:1kB, UID:1000 pgtables:1kB",
    "Memory cgroup out of memory: Killed process 30239 ({name}) total-vm:1kB",
    "oom-kill:constraint=CONSTRAINT_MEMCG,cpuset=/,oom_memcg=/{free},task_memcg=/{free},task={name},pid=30239,uid=1000",
    "Memory cgroup stats for /{free}:",
    "[  30239]  1000 30239     1234      567    12345        0             0 {name}",
    "INFO: task {name}:30239 blocked for more than 120 seconds.",
    "task:{name} state:D stack:0 pid:30239 tgid:30239 ppid:1",
    "process '{free}' started with executable stack",
    "process `{name}' is using obsolete setsockopt SO_BSDCOMPAT",
    "warning: `{name}' uses 32-bit capabilities (legacy support in use)",
    "coredump: 30239({name}): |/usr/bin/{free} pipe failed",
    'audit: type=1701 audit(1.1:1): auid=1000 uid=1000 pid=30239 comm="{name}" exe="/tmp/{free}" sig=11 res=1',
    "Code: fe 7f 5c 17 e1 c5 f8 77 c3 0f 1f 84 00 00 00 00 00 89 f8 48 89 fa",
)


def texts(rule: Rule) -> list[str]:
    """What a forger would copy: the rule's own examples, and the fixed parts of its pattern."""
    family = [x for r in RULES if r.pattern == rule.pattern for x in r.examples]
    return [*rule.examples, *family, *(x for x in literals(rule.pattern) if x)]


def forged(rule: Rule) -> set[str]:
    """Lines of every form with the rule's own words wherever a user can put them."""
    lines = set()
    for text in texts(rule):
        frees = {text, text[NAME_CHARS:], *(text[text.find(w) :] for w in text.split())}
        starts = {text[i : i + n] for i in (0, text.find(": ") + 2) for n in range(1, NAME_CHARS + 1)}
        lines |= {form.format(name=n, free=f) for form in FORMS for n in starts for f in frees}
    return lines


@pytest.mark.parametrize("pattern", PATTERNS, ids=[r.family or r.id for r in PATTERNS.values()])
def test_no_name_of_a_process_file_or_group_passes_for_the_kernels_words(pattern):
    """The pattern alone holds, also against forms that nobody thought of: what is looked for at run time is a second bar."""
    compiled, rule = re.compile(pattern), PATTERNS[pattern]
    assert texts(rule)
    hit = [line for line in forged(rule) if compiled.search(line)]
    assert not hit, hit[:3]
    assert any(compiled.search(x) for x in texts(rule))


def test_the_walk_would_find_a_pattern_that_can_be_forged():
    rule = make_rule({"id": "a", "source": "kmsg", "pattern": "^Oops: ", "examples": ["Oops: 0002 [#1] SMP"]})
    assert any(re.search(rule.pattern, line) for line in forged(rule))
    free = {"pattern": "^md(?P<n>.*): .*Disk failure", "examples": ["md1: b Disk failure"]}
    rule = make_rule({"id": "b", "source": "kmsg", **free})
    assert any(re.search(rule.pattern, line) for line in forged(rule))


def test_a_users_rule_does_not_act_on_a_process_that_calls_itself_so():
    rules = [
        make_rule(
            {"id": "ours", "source": "kmsg", "pattern": "^wedged", "remedy": "reboot", "severity": "fatal"}
        )
    ]
    for form in FORMS:
        if form.startswith("{name}"):
            line = form.format(name="wedged", free="wedged")
            assert begins_with_a_name(line)
            assert RuleEngine(rules).on_line(LogLine("kmsg", line), 0.0) == []
    assert RuleEngine(rules).on_line(LogLine("kmsg", "wedged: the driver is"), 0.0)


@pytest.mark.parametrize("remedy", ["reset-device", "reboot", "replace"])
def test_a_users_rule_that_looks_anywhere_in_the_kernels_lines_is_refused(remedy):
    text = f'[[rule]]\nid = "ours"\nsource = "kmsg"\npattern = "wedged"\nremedy = "{remedy}"\n'
    with pytest.raises(
        UsageError, match=rf"ours.toml, line 4: ours: a pattern that asks for {remedy} must begin with \^"
    ):
        RuleSet().read(text, "ours.toml")
    RuleSet().read(text.replace(remedy, "ask"), "ours.toml")


def test_an_alternative_in_the_middle_of_a_line_does_not_count():
    rule = make_rule({"id": "ours", "source": "kmsg", "pattern": "^ournic|wedged", "remedy": "reboot"})
    assert RuleEngine([rule]).on_line(LogLine("kmsg", "a line that says wedged"), 0.0) == []
    assert RuleEngine([rule]).on_line(LogLine("kmsg", "wedged"), 0.0)


def test_the_process_of_an_xid_does_not_choose_its_variant():
    """Of a link error that is not fatal only a person is told, whatever the process calls itself."""
    line = "NVRM: Xid (PCI:0018:01:00): 145, pid=7, name={}, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x04000000 0x00000008)"
    said = {
        f.rule
        for n in ("python", "Fatal", "a, Fatal", "x 0x7")
        for f in RuleEngine(RULES).on_line(LogLine("kmsg", line.format(n)), 0)
    }
    assert said == {"xid-145-nonfatal"}


# ---------------------------------------------------------------- who wrote it


def test_what_a_program_wrote_into_the_kernels_log_is_not_read(tmp_path):
    file = KmsgFile(tmp_path / "kmsg")
    try:
        with (tmp_path / "kmsg").open("ab") as log:
            for facility in (1, 3, 23):
                log.write(
                    format_record(facility, "Kernel panic - not syncing: mine", priority=facility << 3 | 3)
                )
            log.write(format_record(30, "the kernel's"))
        assert [line.text for line in file.lines()] == ["the kernel's"]
    finally:
        file.close()


KERNELS = {
    "_TRANSPORT": "kernel",
    "SYSLOG_FACILITY": "0",
    "PRIORITY": "0",
    "MESSAGE": "Kernel panic - not syncing: x",
}


@pytest.mark.parametrize(
    "changed",
    [
        {"_TRANSPORT": "syslog"},  # logger --tag kernel --priority kern.emerg
        {"_TRANSPORT": "journal"},
        {"_TRANSPORT": "stdout"},
        {"SYSLOG_FACILITY": "1"},  # written into /dev/kmsg
        {"SYSLOG_FACILITY": ["0", "1"]},
        {"MESSAGE": None},
        {"MESSAGE": [300]},
        {"MESSAGE": {"a": 1}},
    ],
)
def test_what_is_not_the_kernels_in_the_journal_is_not_read(changed):
    assert journal_text(json.dumps(KERNELS).encode()) == "Kernel panic - not syncing: x"
    assert journal_text(json.dumps(KERNELS | changed).encode()) is None


@pytest.mark.parametrize(
    "entry", [b"", b"Kernel panic - not syncing: x", b"[" * 100_000, b'"a"', b"\xff", b"{"]
)
def test_what_is_no_entry_of_the_journal(entry):
    assert journal_text(entry) is None


def test_a_newline_in_a_name_begins_no_line_of_the_journal():
    text = "a\nKernel panic[7]: segfault at 8 ip 0 sp 0 error 4 in x[1+1]"
    entry = json.dumps(KERNELS | {"MESSAGE": list(text.encode())}).encode()
    assert b"\n" not in entry
    assert journal_text(entry) == text
    assert RuleEngine(RULES).on_line(LogLine("kmsg", text), 0.0) == []


# ---------------------------------------------------------------- a log that a script writes


@pytest.mark.parametrize("remedy", [r for r in Remedy if acts_on_node(r)])
@pytest.mark.parametrize("more", [{"fault_on_match": True}, {"pattern": r"lost (\d+)", "above": 1}])
def test_one_line_of_a_script_decides_about_a_worker_and_about_no_node(remedy, more):
    fields = {"id": "ours", "source": "log", "pattern": "lost", "severity": "error"} | more
    assert make_rule(fields | {"remedy": "restart-worker"}).firm
    assert not make_rule(fields | {"remedy": remedy.value}).firm
    assert make_rule(fields | {"remedy": remedy.value, "count": 2}).firm


# ---------------------------------------------------------------- the real thing


def crashes(name: str) -> None:
    """A child of another user's calls itself so, and reads where nothing is."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.string_at(8)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(
    not os.access("/dev/kmsg", os.R_OK) or Path("/proc/sys/debug/exception-trace").read_text().strip() != "1",
    reason="the kernel's log may not be read here, or crashes are not written to it",
)
@pytest.mark.parametrize("name", NAMES)
def test_a_process_that_crashes_under_a_terrible_name(name):
    log, news = Kmsg(), selectors.DefaultSelector()
    try:
        crashes(name)
        lines, until_s = [], time.monotonic() + 20
        news.register(log, selectors.EVENT_READ)
        while not any("segfault" in x.text and x.text.startswith(name) for x in lines):
            assert news.select(until_s - time.monotonic()), lines
            lines += log.lines()
        engine = RuleEngine(RULES)
        found = [f for line in lines for f in engine.on_line(line, 0.0) if acts_on_node(f.remedy)]
        assert found == []
    finally:
        news.close()
        log.close()
