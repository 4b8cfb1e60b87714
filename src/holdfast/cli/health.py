"""`holdfast health`: lists and explains the health rules, judges lines by them, and checks a file of rules."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import AsJson, Output, width_of, write_as

if TYPE_CHECKING:
    from holdfast.health.rules import Rule
    from holdfast.health.ruleset import RuleSet

app = typer.Typer(
    no_args_is_help=True,
    help="Lists and explains health rules, applies them to lines of a log, and checks your own rules.",
)
SXID_DIGITS = 5
"""SXids have this many digits, Xids fewer."""
RuleFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--rules", metavar="FILE", help="File with your own rules, which add to or change the built-in ones."
    ),
]


@app.command("rules")
def rules(
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="SOURCE", help="Show only rules that read this source, for example kmsg."
        ),
    ] = None,
    remedy: Annotated[
        str | None,
        typer.Option(
            "--remedy",
            metavar="REMEDY",
            help="Show only rules that ask for this remedy, for example reboot.",
        ),
    ] = None,
    files: RuleFiles = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Lists the rules: what each looks at, how bad it is, and what it asks for."""
    from holdfast.errors import UsageError
    from holdfast.health.ruleset import load_rules
    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.protocol.health import Remedy

    known = load_rules(files or ())
    sources = sorted({rule.source for rule in known})
    if source is not None and source not in sources:
        raise UsageError(f"--source {source!r}: there is no such source; choose one of {', '.join(sources)}")
    if remedy is not None and remedy not in set(Remedy):
        raise UsageError(f"--remedy {remedy!r}: there is no such remedy; choose one of {', '.join(Remedy)}")
    shown = [r for r in known if source in (None, r.source) and remedy in (None, r.remedy.value)]
    if write_as([_fields(known, r) for r in shown], as_json, output):
        return
    rows = [(r.id, r.source, r.severity.value, r.remedy.value, _gist(r)) for r in shown]
    heads = ("rule", "source", "severity", "asks for", "what it means")
    print_table(sys.stdout, heads, rows, width=width_of(output, WIDTH))


@app.command("explain")
def explain(
    name: Annotated[str, typer.Argument(help="Name of a rule, or an Xid: xid-79, 79 or `xid 79`.")],
    files: RuleFiles = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Explains a rule: what it looks for, what that means, which remedy it asks for, and its source."""
    from holdfast.health.ruleset import load_rules

    known = load_rules(files or ())
    found = _find(known, name)
    if write_as([_fields(known, r) for r in found], as_json, output):
        return
    sys.stdout.write("\n".join(_told(known, r) for r in found))


@app.command("judge")
def judge(
    line: Annotated[
        str,
        typer.Argument(
            help=(
                "A line as the kernel's log, dmesg, syslog or the journal shows it, a file of such lines, or - for "
                "standard input."
            )
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--source",
            metavar="SOURCE",
            help="Where the lines come from. kmsg: the kernel's log. log: a worker's log.",
        ),
    ] = "kmsg",
    files: RuleFiles = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Says which rule a line matches, why, and what would be done."""
    from holdfast.errors import UsageError
    from holdfast.health.kmsg import printed_lines
    from holdfast.health.log_matching import Matchers
    from holdfast.health.rule_engine import subject_of
    from holdfast.health.rules import LINE_SOURCES
    from holdfast.health.ruleset import load_rules
    from holdfast.health.samples import LogLine

    if source not in LINE_SOURCES:
        raise UsageError(
            f"--source {source!r}: must be one of {', '.join(LINE_SOURCES)}, where lines come from"
        )
    known = load_rules(files or ())
    matchers = Matchers(known)
    text = _lines_of(line)
    records = printed_lines(text) if source == "kmsg" else text.splitlines()
    judged = [
        (
            record,
            [(rule, subject_of(rule, match, "")) for rule, match in matchers.find(LogLine(source, record))],
        )
        for record in records
    ]
    told = [
        {
            "line": record,
            "rules": [_fields(known, r) | {"about": about, "done": _done(r)} for r, about in found],
        }
        for record, found in judged
    ]
    if write_as(told, as_json, output):
        return
    for record, found in judged:
        # Of a whole log only what a rule is about is worth reading; of one line the answer "none" is, too.
        if found or len(judged) == 1:
            sys.stdout.write(_judged(known, record, found))
    if len(judged) != 1:
        hit = sum(bool(found) for _, found in judged)
        sys.stdout.write(f"{len(judged)} records, {hit} of them matched a rule\n")


def _lines_of(given: str) -> str:
    """The lines that an argument stands for.

    Raises:
        UsageError: it names a file that cannot be read.
    """
    import errno

    from holdfast.errors import UsageError

    if given == "-":
        return sys.stdin.buffer.read().decode(errors="replace")
    try:
        file = Path(given)
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else given
    except ValueError:
        return given  # a line may hold what no name of a file may
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return given
        raise UsageError(f"{given} cannot be read: {error.strerror}") from None


def _judged(known: RuleSet, record: str, found: list[tuple[Rule, str]]) -> str:
    from holdfast.observe.printable import printable
    from holdfast.observe.tables import WIDTH

    lines = [printable(part) for part in record.split("\n")]
    if not found:
        lines.append("  no rule matches it")
    for rule, about in found:
        rows = [
            ("rule", rule.id + (f", about {printable(about)}" if about.strip() else "")),
            ("meaning", rule.wording),
            ("done", _done(rule)),
            ("because", f"severity {rule.severity.value}, asks for {rule.remedy.value}"),
            ("from", rule.reference),
            ("written in", known.origin(rule.id)),
        ]
        for head, words in rows:
            lines += _folded(head, words, WIDTH) if words else []
    return "\n".join(lines) + "\n\n"


def _done(rule: Rule) -> str:
    """What the coordinator would do about a match."""
    from holdfast.protocol.health import Remedy, Severity, remedy_text

    when = _when(rule)
    if not rule.enabled:
        return "nothing is done: the rule is switched off"
    if rule.dry_run:
        return "it is only recorded: the rule is on trial"
    if rule.remedy is Remedy.ASK:
        words = "a person is asked to act"
    elif rule.remedy is Remedy.WATCH or rule.severity in (Severity.INFO, Severity.WARNING):
        words = "it is only recorded"
    else:
        words = re.sub("^it ", "the node ", remedy_text(rule.remedy))
        at_once = rule.severity is Severity.FATAL or rule.remedy is Remedy.RESTART_WORKER
        words += " at once" if at_once else " between two steps"
    return words + (f" ({when})" if when else "")


@app.command("check")
def check(file: Annotated[Path, typer.Argument(help="File of rules (TOML).")]) -> None:
    """Checks a file of rules: shows what it adds and changes, or the line with an error."""
    from holdfast.errors import UsageError
    from holdfast.health.ruleset import catalogue

    known = catalogue()
    before = {rule.id: rule for rule in known}
    readings = {(rule.source, rule.reading) for rule in known}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    for id in known.read(text, str(file)):
        rule = known.get(id)
        if rule == before.get(id):
            continue
        assert rule is not None
        what = "adds" if id not in before else "changes" if rule.enabled else "switches off"
        sys.stdout.write(f"{what:<12} {id}: {rule.severity}, asks for {rule.remedy}\n")
        if rule.reading and (rule.source, rule.reading) not in readings:
            sys.stdout.write(
                f"{'':<12} no other rule uses the reading {rule.reading} of {rule.source}: is it misspelt?\n"
            )
    sys.stdout.write(f"{file} is valid\n")


def _find(known: RuleSet, name: str) -> list[Rule]:
    """The rule of this name, with the variants of its code.

    Raises:
        UsageError: there is none; the nearest names are told.
    """
    import difflib

    from holdfast.errors import UsageError

    # As people copy it from a log: `Xid 79`, `xid: 79` and `79` are all the rule `xid-79`.
    plain = re.sub(r"[\s:=]+", "-", name.strip().lower())
    tries = [plain, f"xid-{plain}", f"sxid-{plain}"] if plain.isdigit() else [plain]
    for id in tries:
        rule = known.get(id)
        if rule is not None:
            more = (r for r in known if rule.family and r.id.startswith(f"{id}-"))
            return [rule, *more]
    if re.fullmatch(r"(s?xid-)?\d+", plain):
        number = plain.rpartition("-")[2]
        family = "sxid" if plain.startswith("sxid") or len(number) > SXID_DIGITS - 1 else "xid"
        raise UsageError(
            f"{name!r} is not in the catalogue; the rule {family}-unknown applies to such codes, see `holdfast "
            f"health explain {family}-unknown`"
        )
    near = difflib.get_close_matches(plain, [r.id for r in known], n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"there is no rule named {name!r}{hint}; `holdfast health rules` lists all rules")


def _told(known: RuleSet, rule: Rule) -> str:
    from holdfast.observe.tables import WIDTH

    flags = [k for k in ("shared", "dry_run") if getattr(rule, k)] + (
        [] if rule.enabled else ["switched off"]
    )
    rows = [
        ("meaning", rule.wording),
        ("looks at", f"{rule.source}: {_looks(rule)}"),
        ("severity", rule.severity.value),
        (
            "asks for",
            rule.remedy.value + (f"  ({', '.join(flags)})".replace("dry_run", "on trial") if flags else ""),
        ),
        ("when", _when(rule)),
        ("from", rule.reference),
        ("written in", known.origin(rule.id)),
        *(("example", line) for line in rule.examples[:3]),
    ]
    lines = [rule.id]
    for head, text in rows:
        if text:
            lines += _folded(head, text, WIDTH)
    return "\n".join(lines) + "\n"


def _folded(head: str, text: str, width: int) -> list[str]:
    import textwrap

    room = width - 14
    parts = textwrap.wrap(text, room, break_long_words=True, break_on_hyphens=False) or [""]
    return [f"  {head if i == 0 else '':<12}{part}" for i, part in enumerate(parts)]


def _looks(rule: Rule) -> str:
    from holdfast.health.rules import CONDITIONS

    if rule.unknown:
        return "a value that cannot be read"
    if rule.reading:
        condition = next(c for c in CONDITIONS if getattr(rule, c) not in (None, ""))
        return f"{rule.reading} {condition.replace('_', ' ')} {getattr(rule, condition)}"
    code = f", code {rule.code}" if rule.family else ""
    return f"lines like {rule.pattern}{code}"


def _when(rule: Rule) -> str:
    words = []
    if rule.start_within:
        words.append(f"no such line within {rule.start_within:g} s of the start")
    if rule.every:
        words.append(f"no such line for {rule.every:g} s or longer")
    if rule.above is not None and rule.pattern:
        words.append(f"its number is above {rule.above:g}")
    if rule.below is not None and rule.pattern:
        words.append(f"its number is below {rule.below:g}")
    if rule.count > 1:
        words.append(f"{rule.count} times" + (f" within {rule.window:g} s" if rule.window else " in a row"))
    elif rule.window and not rule.share:
        words.append(f"within {rule.window:g} s")
    if rule.share:
        words.append(f"for {rule.share:.0%} of {rule.window:g} s")
    if rule.holds:
        words.append(f"for {rule.holds:g} s without a break")
    return ", ".join(words)


def _gist(rule: Rule) -> str:
    """The first sentence, with a mark for what is off or on trial."""
    mark = "(off) " if not rule.enabled else "(on trial) " if rule.dry_run else ""
    return mark + re.split(r"(?<=[.;:]) ", rule.wording)[0].rstrip(".;:")


def _fields(known: RuleSet, rule: Rule) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(rule)
    fields.pop("own", None)
    return fields | {"severity": rule.severity, "remedy": rule.remedy, "written_in": known.origin(rule.id)}
