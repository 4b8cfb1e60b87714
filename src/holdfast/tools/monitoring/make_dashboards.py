"""Generates Grafana's dashboards from a few lines for each panel.

`python -m holdfast.tools.monitoring.make_dashboards DIR` writes them; the ones in `dashboards/` are committed. They are
in Grafana's classic JSON (schema 39, read by 10.4 and later), with the data source as a variable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = 39
WIDTH = 24
"""Columns of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = '{holdfast_job=~"$holdfast_job"}'
IDLE = '{mode="idle"}'
OPENED, RUNNING, LOST = 'kind="incident-opened"', 'phase="running"', 'class!~"productive|computed"'

Panel = dict[str, Any]


def ours(metric: str, labels: str = "", over: str = "") -> str:
    """A metric of the chosen jobs. over: a range, such as `$__rate_interval`."""
    more = f",{labels}" if labels else ""
    return f'{metric}{{holdfast_job=~"$holdfast_job"{more}}}' + (f"[{over}]" if over else "")


def rate(metric: str, labels: str = "") -> str:
    """Rate of a counter, per second."""
    return f"rate({ours(metric, labels, '$__rate_interval')})"


def moved(metric: str) -> str:
    """Rate of a counter that agents read, per second and node. Agents read it every 30 or 60 seconds, so with a shorter
    range it would be 0 in one scrape and twice the rate in the next."""
    return f"sum by (node) (rate({ours(metric, over='5m')}))"


def quantile(q: float, metric: str, by: str) -> str:
    """A quantile of a histogram since the start. An increase would miss the first incident of each kind, whose series
    begins with it."""
    return f"histogram_quantile({q}, sum by (le, {by}) ({ours(metric + '_bucket')}))"


def _panel(
    kind: str, title: str, text: str, unit: str, targets: Iterable[tuple[str, str]], width: int
) -> Panel:
    at: Panel = {"h": 4 if kind == "stat" else 8, "w": width, "x": 0, "y": 0}
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for i, (expr, legend) in enumerate(targets)
        ],
    }


def lines(title: str, text: str, unit: str, *targets: tuple[str, str], stacked: bool = False) -> Panel:
    """Curves over time. targets: each a query and its legend."""
    panel = _panel("timeseries", title, text, unit, targets, 12)
    # Never joined over a gap: an unknown value must not look like a known one.
    custom: dict[str, Any] = {"spanNulls": False, "fillOpacity": 40 if stacked else 0}
    custom |= {"stacking": {"mode": "normal", "group": "A"}} if stacked else {}
    panel["fieldConfig"]["defaults"]["custom"] = custom
    panel["options"] = {
        "tooltip": {"mode": "multi"},
        "legend": {"displayMode": "list", "placement": "bottom"},
    }
    return panel


def number(title: str, text: str, unit: str, expr: str) -> Panel:
    """The newest value, one for each job."""
    panel = _panel("stat", title, text, unit, [(expr, "{{holdfast_job}}")], 4)
    panel["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "auto"}
    return panel


def rows(title: str, text: str, *targets: tuple[str, str], unit: str = "none") -> Panel:
    """A table of newest values. targets: each a query and the name of its column."""
    panel = _panel("table", title, text, unit, targets, WIDTH)
    for target in panel["targets"]:
        target |= {"format": "table", "instant": True}
    names = {f"Value #{t['refId']}": t["legendFormat"] for t in panel["targets"]}
    hidden = {"Time": True, "__name__": True, "job": True, "instance": True}
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"renameByName": names, "excludeByName": hidden}},
    ]
    return panel


def _placed(panels: Iterable[Panel]) -> list[Panel]:
    """Places the panels from left to right, each row as high as its highest panel."""
    x = y = height = 0
    done = []
    for number_, panel in enumerate(panels, 1):
        at = panel["gridPos"]
        if x + at["w"] > WIDTH:
            x, y, height = 0, y + height, 0
        done.append({**panel, "id": number_, "gridPos": {**at, "x": x, "y": y}})
        x, height = x + at["w"], max(height, at["h"])
    return done


def _dashboard(uid: str, title: str, text: str, panels: Iterable[Panel]) -> dict[str, Any]:
    incidents = f"changes({ours('holdfast_events_total', OPENED, '1m')}) > 0"
    return {
        "uid": f"holdfast-{uid}",
        "title": f"Holdfast: {title}",
        "description": text,
        "tags": ["holdfast"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "data source"},
                {
                    "name": "holdfast_job",
                    "label": "job",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": "label_values(holdfast_job_info, holdfast_job)",
                    # Queried again when the time range changes (2): jobs come and go while a dashboard is
                    # open.
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    # Otherwise Grafana writes every job's name into each query, which grows with the site.
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "incidents",
                    "datasource": SOURCE,
                    "enable": True,
                    "iconColor": "red",
                    "expr": incidents,
                    "titleFormat": "incident of {{holdfast_job}}",
                    "textFormat": "holdfast why --job {{holdfast_job}}",
                }
            ]
        },
        "panels": _placed(panels),
    }


def fleet() -> dict[str, Any]:
    """The dashboard of all jobs of a site."""
    panels = [
        number("Jobs", "Jobs that are scraped.", "none", f"count(holdfast_job_info{JOB})"),
        number("Training", "Jobs that train now.", "none", f"sum({ours('holdfast_phase', RUNNING)})"),
        number("Open incidents", "Not yet back at full strength.", "none", f"sum(holdfast_open_incidents{JOB})"),
        number("Asked", "Matters that wait for a person.", "none", f"sum(holdfast_health_asks{JOB})"),
        number("Nodes", "Connected, spares included.", "none", f"sum(holdfast_nodes{JOB})"),
        number("Quarantine", "Machines that are not used.", "none", f"sum(holdfast_quarantined_machines{JOB})"),
        rows(
            "Jobs",
            "The newest values of each job; `holdfast ls` says the same.",
            (f"sum by (holdfast_job) (holdfast_step{JOB})", "step"),
            (f"sum by (holdfast_job) (holdfast_recent_goodput{JOB})", "goodput, last hour"),
            (f"sum by (holdfast_job) (holdfast_world_size{JOB})", "workers"),
            (f"sum by (holdfast_job) (holdfast_target_world_size{JOB})", "wanted"),
            (f"sum by (holdfast_job) (holdfast_open_incidents{JOB})", "open incidents"),
            (f"sum by (holdfast_job) (holdfast_health_asks{JOB})", "asked"),
        ),
        lines(
            "Goodput",
            "Share of productive time in the last hour, or since a younger job's start. Missing: not known.",
            "percentunit",
            (f"holdfast_recent_goodput{JOB}", "{{holdfast_job}}"),
        ),
        lines(
            "Lost time",
            "Since the jobs' start by what it was spent on, without steps that stayed.",
            "s",
            (f"sum by (class) ({ours('holdfast_time_seconds', LOST)})", "{{class}}"),
            stacked=True,
        ),
        lines(
            "Incidents",
            "Since the jobs' start, by the kind of their cause.",
            "none",
            (f"sum by (kind) (holdfast_incidents_total{JOB})", "{{kind}}"),
            stacked=True,
        ),
        lines(
            "Recoveries",
            "Incidents that came back to full strength, by who had to act.",
            "none",
            (f"sum by (by) (holdfast_recoveries_total{JOB})", "{{by}}"),
        ),
        lines("Spares", "Nodes that could take another's place.", "none", (f"holdfast_spares{JOB}", "{{holdfast_job}}")),
        lines(
            "Checkpoints that fail",
            "1 while the newest attempt at a tier failed, or no byte of it arrives.",
            "none",
            (f"holdfast_tier_failing{JOB}", "{{holdfast_job}} {{tier}} fails"),
            (f"holdfast_tier_slow{JOB}", "{{holdfast_job}} {{tier}} is slow"),
        ),
    ]  # fmt: skip
    return _dashboard("fleet", "fleet", "All jobs: which of them needs somebody?", panels)


def job() -> dict[str, Any]:
    """The dashboard of one job."""
    panels = [
        number("Step", "Committed steps of the current state.", "none", f"holdfast_step{JOB}"),
        number("Age of the newest commit", "At level 2.", "s", f"holdfast_step_age_seconds{JOB}"),
        number("Workers", "That compute in the newest generation.", "none", f"holdfast_world_size{JOB}"),
        number("Goodput", "Of the last hour.", "percentunit", f"holdfast_recent_goodput{JOB}"),
        number("Open incidents", "See `holdfast why`.", "none", f"holdfast_open_incidents{JOB}"),
        number("Asked", "Matters that wait for a person.", "none", f"holdfast_health_asks{JOB}"),
        lines("Loss", "Mean over the global batch.", "none", (f"holdfast_loss{JOB}", "{{holdfast_job}}")),
        lines(
            "Gradient norm",
            "Of the global gradient before clipping.",
            "none",
            (f"holdfast_gradient_norm{JOB}", "{{holdfast_job}}"),
        ),
        lines(
            "Learning rate",
            "Of the optimizer's first group.",
            "none",
            (f"holdfast_learning_rate{JOB}", "{{holdfast_job}}"),
        ),
        lines(
            "Logged by the script",
            "The newest values of `run.log`.",
            "none",
            (f"holdfast_run_value{JOB}", "{{name}}"),
        ),
        lines(
            "Throughput",
            "Samples, tokens or what else the script weighs by, each second; repeated steps included.",
            "none",
            (rate("holdfast_weight_total"), "{{holdfast_job}}"),
        ),
        lines(
            "Step time",
            "The median of steps by themselves, on the slowest rank.",
            "s",
            (f"holdfast_step_median_seconds{JOB}", "{{holdfast_job}}"),
        ),
        lines(
            "Workers",
            "That compute, and at full strength.",
            "none",
            (f"holdfast_world_size{JOB}", "{{holdfast_job}} computes"),
            (f"holdfast_target_world_size{JOB}", "{{holdfast_job}} wants"),
        ),
        lines(
            "Steps",
            "Committed steps, and those that had to be computed again.",
            "none",
            (f"holdfast_steps_committed_total{JOB}", "committed"),
            (f"holdfast_steps_lost_total{JOB}", "lost"),
        ),
        lines(
            "Wall time",
            "Since the start by what it was spent on. The classes add up to the wall time.",
            "s",
            (f"sum by (class) (holdfast_time_seconds{JOB})", "{{class}}"),
            stacked=True,
        ),
        lines(
            "Stalls",
            "From a fault to the next commit: half of them are shorter, and nine of ten, by kind, since the start.",
            "s",
            (quantile(0.5, "holdfast_incident_stall_seconds", "kind"), "{{kind}} half"),
            (quantile(0.9, "holdfast_incident_stall_seconds", "kind"), "{{kind}} nine of ten"),
        ),
        lines(
            "Back at full strength",
            "From a fault: nine of ten are shorter, by kind, since the start.",
            "s",
            (quantile(0.9, "holdfast_incident_full_strength_seconds", "kind"), "{{kind}}"),
        ),
        lines(
            "Phases of incidents",
            "Mean of each phase since the start.",
            "s",
            (
                f"sum by (phase) ({ours('holdfast_incident_phase_seconds_sum')}) / "
                f"sum by (phase) ({ours('holdfast_incident_phase_seconds_count')})",
                "{{phase}}",
            ),
        ),
        lines(
            "Slow ranks",
            "Computing time over that of the peers.",
            "none",
            (f"holdfast_slow_rank_ratio{JOB}", "rank {{rank}} on {{node}}: {{part}}"),
        ),
        lines(
            "Planned changes",
            "Mean stall of a resize, drain or newcomer.",
            "s",
            (
                f"{ours('holdfast_change_stall_seconds_sum')} / {ours('holdfast_change_stall_seconds_count')}",
                "{{holdfast_job}}",
            ),
        ),
    ]
    return _dashboard(
        "job", "job", "One job: is the loss as it should be, and where did the time go?", panels
    )


def nodes() -> dict[str, Any]:
    """The dashboard of nodes and of their health findings, next to the series of other exporters for the same hosts."""
    # Exporters identify a host by its address and port, or by a label of their own; both become `host`. One
    # host may have nodes of several jobs, so the exporter's side is the unique one.
    here = f"group by (host, node) (holdfast_node_info{JOB})"

    def beside(how: str, expr: str, label: str) -> str:
        host = f'label_replace({expr}, "host", "$1", "{label}", "([^:]+).*")'
        return f"{here} * on (host) group_left () {how} by (host) ({host})"

    panels = [
        rows(
            "Nodes",
            "Connected nodes: where they are, how many ranks they carry, how often their workers failed.",
            (f"sum by (node, host, rack) (holdfast_node_info{JOB})", "connected"),
            (f"sum by (node) (holdfast_node_ranks{JOB})", "ranks"),
            (f"sum by (node) (holdfast_node_failures_total{JOB})", "failures"),
            (f"sum by (node) (holdfast_node_held{JOB})", "held"),
        ),
        lines(
            "Nodes",
            "Connected, held (checked, reset, or waiting for a person), leaving, unwatched.",
            "none",
            (f"sum(holdfast_nodes{JOB})", "connected"),
            (f"sum(holdfast_held_nodes{JOB})", "held"),
            (f"sum(holdfast_leaving_nodes{JOB})", "leaving"),
            (f"sum(holdfast_unwatched_nodes{JOB})", "unwatched"),
        ),
        lines(
            "Quarantine and asks",
            "Machines that are not used, and matters that wait for a person.",
            "none",
            (f"holdfast_quarantined_machines{JOB}", "{{holdfast_job}} quarantine"),
            (f"holdfast_health_asks{JOB}", "{{holdfast_job}} asked"),
        ),
        lines(
            "Findings",
            "Since the start, by rule.",
            "none",
            (f"sum by (rule) (holdfast_findings_total{JOB})", "{{rule}}"),
        ),
        lines(
            "Remedies",
            "Carried out since the start.",
            "none",
            (f"sum by (remedy) (holdfast_health_actions_total{JOB})", "{{remedy}}"),
        ),
        lines(
            "Findings without action",
            "By the reason against it.",
            "none",
            (f"sum by (against) (holdfast_health_withheld_total{JOB})", "{{against}}"),
        ),
        lines(
            "GPU utilisation",
            "Mean of a node's GPUs: share of time in which a kernel ran, as the node's agent reads it every 30 seconds.",
            "percentunit",
            (f"avg by (node) (holdfast_node_gpu_utilization_ratio{JOB})", "{{node}}"),
        ),
        lines(
            "GPU temperature",
            "The hottest GPU of a node, as its agent reads it.",
            "celsius",
            (f"max by (node) (holdfast_node_gpu_temperature_celsius{JOB})", "{{node}}"),
        ),
        lines(
            "GPU power",
            "Sum of a node's GPUs, as its agent reads it.",
            "watt",
            (f"sum by (node) (holdfast_node_gpu_power_watts{JOB})", "{{node}}"),
        ),
        lines(
            "GPU memory",
            "In use, sum of a node's GPUs, as its agent reads it.",
            "bytes",
            (f"sum by (node) (holdfast_node_gpu_memory_used_bytes{JOB})", "{{node}}"),
        ),
        lines(
            "Network",
            "Received and sent by a node's interfaces, mean of five minutes, as its agent reads it. Nodes on one host show the "
            "same interfaces.",
            "Bps",
            (moved("holdfast_node_network_received_bytes_total"), "{{node}} received"),
            (moved("holdfast_node_network_sent_bytes_total"), "{{node}} sent"),
        ),
        lines(
            "Disks",
            "Read from and written to a node's drives, mean of five minutes, as its agent reads it.",
            "Bps",
            (moved("holdfast_node_disk_read_bytes_total"), "{{node}} read"),
            (moved("holdfast_node_disk_written_bytes_total"), "{{node}} written"),
        ),
        lines(
            "GPU utilisation, DCGM's",
            "Of DCGM's exporter on the same hosts.",
            "percent",
            (beside("avg", "DCGM_FI_DEV_GPU_UTIL", "Hostname"), "{{node}}"),
        ),
        lines(
            "GPU temperature, DCGM's",
            "The hottest of a node, of DCGM's exporter.",
            "celsius",
            (beside("max", "DCGM_FI_DEV_GPU_TEMP", "Hostname"), "{{node}}"),
        ),
        lines(
            "Processors idle",
            "Share of all, of the node exporter on the same hosts.",
            "percentunit",
            (beside("avg", f"rate(node_cpu_seconds_total{IDLE}[$__rate_interval])", "instance"), "{{node}}"),
        ),
        lines(
            "Network received, node exporter's",
            "Of the node exporter on the same hosts.",
            "Bps",
            (
                beside("sum", "rate(node_network_receive_bytes_total[$__rate_interval])", "instance"),
                "{{node}}",
            ),
        ),
    ]
    return _dashboard("nodes", "node health", "Which node is sick, and what was done about it?", panels)


def storage() -> dict[str, Any]:
    """The dashboard of saved state."""
    panels = [
        lines(
            "Age of what is saved",
            "Time since the newest state in a tier was copied: what a loss of the rest would cost.",
            "s",
            (f"holdfast_saved_age_seconds{JOB}", "{{holdfast_job}} {{tier}}"),
        ),
        lines(
            "Step of what is saved",
            "Of the newest save in each tier.",
            "none",
            (f"holdfast_saved_step{JOB}", "{{holdfast_job}} {{tier}}"),
            (f"holdfast_step{JOB}", "{{holdfast_job}} now"),
        ),
        lines(
            "Copies that wait",
            "Since when the oldest snapshot that is not complete has waited for its copies.",
            "s",
            (f"holdfast_replication_lag_seconds{JOB}", "{{holdfast_job}}"),
        ),
        lines(
            "Snapshots",
            "Mean time until one is complete, and mean stall of training.",
            "s",
            (
                f"{rate('holdfast_snapshot_duration_seconds_sum')} / {rate('holdfast_snapshot_duration_seconds_count')}",
                "{{holdfast_job}} until complete",
            ),
            (
                f"{rate('holdfast_snapshot_stall_seconds_sum')} / {rate('holdfast_snapshot_stall_seconds_count')}",
                "{{holdfast_job}} stall",
            ),
        ),
        lines(
            "Bytes",
            "Of snapshots, of their copies, and written to durable tiers, each second.",
            "Bps",
            (rate("holdfast_snapshot_bytes_total"), "snapshots"),
            (rate("holdfast_snapshot_copied_bytes_total"), "copies"),
            (rate("holdfast_checkpoint_bytes_total"), "{{tier}}"),
        ),
        lines(
            "Checkpoints",
            "Mean time until one is complete in its tier, since the start.",
            "s",
            (
                f"{ours('holdfast_checkpoint_duration_seconds_sum')} / "
                f"{ours('holdfast_checkpoint_duration_seconds_count')}",
                "{{holdfast_job}} {{tier}}",
            ),
        ),
        lines(
            "Trouble",
            "Since the start: failed, left out, found damaged.",
            "none",
            (f"holdfast_checkpoint_failures_total{JOB}", "{{tier}} failed"),
            (f"holdfast_checkpoints_skipped_total{JOB}", "{{tier}} was behind"),
            (f"holdfast_snapshots_skipped_total{JOB}", "no memory for a shard"),
            (f"holdfast_saves_unreadable_total{JOB}", "damaged"),
        ),
        lines(
            "Tiers that fail or stand still",
            "1 while the newest attempt failed, or no byte of it arrives.",
            "none",
            (f"holdfast_tier_failing{JOB}", "{{holdfast_job}} {{tier}} fails"),
            (f"holdfast_tier_slow{JOB}", "{{holdfast_job}} {{tier}} stands still"),
        ),
        lines(
            "Ledger",
            "1 while it can be written.",
            "none",
            (f"holdfast_ledger_writable{JOB}", "{{holdfast_job}}"),
        ),
    ]
    return _dashboard("storage", "storage", "How much would be lost, and where is the rest?", panels)


def dashboards() -> dict[str, bytes]:
    """File names and contents of all dashboards."""
    made = {"fleet": fleet(), "job": job(), "nodes": nodes(), "storage": storage()}
    return {
        f"{name}.json": msgspec.json.format(msgspec.json.encode(x), indent=1) + b"\n"
        for name, x in made.items()
    }


def main() -> None:
    """Writes the dashboards into the given folder."""
    for name, content in dashboards().items():
        (Path(sys.argv[1]) / name).write_bytes(content)


if __name__ == "__main__":
    main()
