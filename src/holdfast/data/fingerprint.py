"""Checks that the data of a checkpoint has not changed: a run that resumes on other samples is refused, with the
reason.

A checkpoint has `identity(dataset)`: plain values, a few hundred bytes for each file, independent of the world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import UsageError

_FIELDS = {
    "bytes": "bytes",
    "dtype": "dtype",
    "tokens": "tokens",
    "documents": "documents",
    "probes": "content",
    "edges": "document edges",
}
_HASHED = ("probes", "edges")
_MOST_NAMED = 5


def identity(dataset: Any) -> dict[str, Any] | None:
    """The values to save for a data set; None if it has no fingerprint."""
    if hasattr(dataset, "identity"):
        own: dict[str, Any] = dataset.identity()
        return own
    if hasattr(dataset, "fingerprint"):
        return {"fingerprint": dataset.fingerprint}
    return None


def check_fingerprint(saved: Mapping[str, Any] | str, dataset: Any) -> None:
    """Compares a data set with the saved identity. Files may have moved: only their content counts.

    Args:
        saved: the result of `identity` when the checkpoint was made, or the fingerprint alone.
        dataset: the data set of the run that resumes.

    Raises:
        UsageError: the data set is different; the message names the files and what changed in them.
    """
    before = {"fingerprint": saved} if isinstance(saved, str) else saved
    now = identity(dataset)
    if now is None:
        raise UsageError(
            f"the checkpoint was made with a data set of fingerprint {before.get('fingerprint')}, but "
            f"{type(dataset).__name__} does not have a fingerprint; resume with the data set that the run began with"
        )
    # The fingerprints decide. Everything after this line only describes the difference, so a field that an
    # older version did not save can never refuse a run.
    if now["fingerprint"] == before.get("fingerprint"):
        return
    differences = list(_differences(before, now)) if len(before) > 1 else []
    if not differences:
        differences = [f"its fingerprint was {before.get('fingerprint')} and is now {now['fingerprint']}"]
    more = len(differences) - _MOST_NAMED
    listed = "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    raise UsageError(
        f"the data set changed since the checkpoint: {listed}. Restore the data to resume, or start a new run "
        "(another --job)"
    )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for setting in ("seq_len", "documents", "pad_token", "mixture", "weight"):
        if before.get(setting) != now.get(setting):
            name = "the version of mixtures" if setting == "mixture" else setting
            yield f"{where}{name} was {before.get(setting)} and is now {now.get(setting)}"
    yield from _changed_files(before.get("files", []), now.get("files", []), where)
    sources, present = before.get("sources", []), now.get("sources", [])
    if len(sources) != len(present):
        yield f"{where}the mixture had {len(sources)} sources and now has {len(present)}"
        return
    for number, (old, new) in enumerate(zip(sources, present, strict=True)):
        if old.get("fingerprint") != new.get("fingerprint") or old.get("weight") != new.get("weight"):
            changes = list(_differences(old, new, f"{where}source {number}: "))
            yield from changes or [f"{where}source {number} is another data set"]


def _changed_files(
    before: list[Mapping[str, Any]], now: list[Mapping[str, Any]], where: str
) -> Iterator[str]:
    if len(before) != len(now):
        paths, present = [file["path"] for file in before], [file["path"] for file in now]
        yield f"{where}it had {len(before)} files and now has {len(now)}"
        yield from (f"{where}{path} is missing" for path in paths if path not in present)
        yield from (f"{where}{path} is new" for path in present if path not in paths)
        return
    for old, new in zip(before, now, strict=True):
        changed = [field for field in _FIELDS if old.get(field) != new.get(field)]
        # A data set that was converted to another format has the same tokens in the same order, and a run may
        # go on with it.
        if all(old.get(field) == new.get(field) for field in ("dtype", "tokens", *_HASHED)):
            continue
        named = [
            f"{_FIELDS[field]} changed"
            if field in _HASHED
            else f"{_FIELDS[field]} {old.get(field)} -> {new.get(field)}"
            for field in changed
        ]
        moved = f" (it was {old['path']})" if old["path"] != new["path"] else ""
        yield f"{where}{new['path']}{moved}: {', '.join(named)}"
