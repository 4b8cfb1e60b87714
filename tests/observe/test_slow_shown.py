"""Slow ranks on the board and in the report, and where ranks stood in a hang."""

import io
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.observe.dashboard import board
from holdfast.observe.tables import print_report
from holdfast.protocol.job_view import JobView
from reports import report_of


def view(status):
    return msgspec.convert(status, JobView)


SLOW = {
    "rank": 2, "node": "node2", "worker": "node2.0#3", "ratio": 1.482, "part": "the forward pass", "since_step": 40,
    "found_step": 71, "until_step": None, "excess_s": 0.03, "share": 0.31, "worker_hours_per_hour": 0.93, "lost_s": 12.3,
}  # fmt: skip


def test_the_board_has_a_line(status):
    text = io.StringIO()
    Console(file=text, width=100).print(board(view(status | {"slow": [SLOW]})))
    assert (
        "slow   rank 2 on node2 takes 1.48 times its peers' time since step 40; they wait 31.0% of the time"
        in text.getvalue()
    )


def test_the_report_has_a_table_of_100_columns(report):
    text = io.StringIO()
    print_report(report_of(report | {"slow": [SLOW]}), Path("/jobs/demo"), text)
    lines = text.getvalue().splitlines()
    row = next(line for line in lines if "the forward pass" in line)
    assert row.split() == [
        "2",
        "node2",
        "the",
        "forward",
        "pass",
        "1.48",
        "40",
        "–",
        "71",
        "31.0%",
        "0.93",
        "12.3",
        "s",
    ]
    assert max(map(len, lines)) <= 100


def test_an_incident_tells_where_all_ranks_stood(report, incident):
    where = "61 ranks in all_reduce, 2 in a data loader (ranks 17, 40)"
    text = io.StringIO()
    print_report(report_of(report | {"incidents": [incident | {"where": where}]}), Path("/jobs/demo"), text)
    assert "61 ranks in all_reduce" in text.getvalue()
