"""What safety costs this job, by its own figures, and what another interval between snapshots would cost.

The formulas are those of `holdfast plan`; nothing is assumed that the job has not shown itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast import formulas
from holdfast.protocol import units
from holdfast.protocol.phases import TimeClass
from holdfast.web.story import Story

RECOVERY = (
    TimeClass.DETECT, TimeClass.DECIDE, TimeClass.REPLACE, TimeClass.JOIN, TimeClass.RESTORE, TimeClass.FIRST_STEP,
)  # fmt: skip
"""Classes of time that failures take, beside the steps that are done again."""


def cost(story: Story, goodput: Mapping[str, Any]) -> dict[str, Any]:
    """incidents, mtbf_s, each_s: what one takes; went_back: those that lost steps; snapshots: their number, every_s,
    snapshot_s; now, best: an interval, and the share of time that is kept with it; words. Unknown is None."""
    classes, wall_s = goodput.get("classes") or {}, goodput.get("wall_s")
    there = [i for i in list(story.incidents.values()) if not i.get("quiet")]
    failures = len(there) + story.forgotten_failures
    went_back = sum(bool(i.get("lost_steps")) for i in there) + story.forgotten_went_back
    count, begun_s, newest_s = story.snapshots
    found: dict[str, Any] = {
        "incidents": failures,
        "mtbf_s": wall_s / failures if wall_s and failures else None,
        "each_s": sum(classes.get(kind, 0.0) for kind in (*RECOVERY, TimeClass.RECOMPUTED)) / failures
        if failures
        else None,
        "went_back": went_back,
        "snapshots": count,
        "every_s": (newest_s - begun_s) / (count - 1) if count > 1 and newest_s > begun_s else None,
        "snapshot_s": classes.get(TimeClass.SNAPSHOT_STALL, 0.0) / count if count else None,
        "now": None,
        "best": None,
    }
    if went_back and wall_s:
        recovery_s = sum(classes.get(kind, 0.0) for kind in RECOVERY) / failures
        found |= _expected(wall_s / went_back, recovery_s, found["every_s"], found["snapshot_s"])
    found["words"] = _words(found)
    return found


def _expected(
    mtbf_s: float, recovery_s: float, every_s: float | None, save_s: float | None
) -> dict[str, Any]:
    """Both by the same formula: the job's own share has its luck in it, and would not compare.

    mtbf_s: between failures that went back to a snapshot. Of one that lost no step an interval changes nothing.
    """
    if every_s is None or not save_s:
        return {}
    best_s = max(formulas.daly_interval_s(save_s, mtbf_s), save_s)

    def share(interval_s: float) -> dict[str, float]:
        kept = formulas.goodput(mtbf_s, interval_s, save_s, recovery_s)
        return {"every_s": round(interval_s, 3), "share": round(kept, 6)}

    return {"now": share(every_s), "best": share(best_s)}


def _words(found: Mapping[str, Any]) -> str:
    if not found["incidents"]:
        return "No failure so far: snapshots are all that safety has cost."
    told = (
        f"{units.plural(found['incidents'], 'failure')}, one in {units.seconds(found['mtbf_s'])}, "
        f"each took {units.seconds(found['each_s'])}."
    )
    if not found["went_back"]:
        return f"{told} None of them went back to a snapshot, so another interval between snapshots would have kept no more."
    told += f" {found['went_back']} went back to a snapshot."
    if found["best"] is None:
        return told
    now, best = found["now"], found["best"]
    same = abs(best["share"] - now["share"]) < 0.001
    told += f" With a snapshot every {units.seconds(now['every_s'])}, {units.share(now['share'])} of the time is kept at this rate"
    if same:
        return f"{told}; no other interval keeps noticeably more."
    return f"{told}; every {units.seconds(best['every_s'])}, {units.share(best['share'])} would be."
