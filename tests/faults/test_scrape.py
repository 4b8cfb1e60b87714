"""What Prometheus gets of a job that runs."""

import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_snapshots import EVERY, kill_all, paused_at

from holdfast.protocol.network.endpoint import read_endpoint


def scrape(job_dir, token):
    where = read_endpoint(job_dir)
    assert where is not None
    request = urllib.request.Request(f"{where.url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *s.labels.values()): s.value for s in samples}


@pytest.mark.long
def test_a_running_job_is_scraped(tmp_path):
    tier = tmp_path / "saved"
    options = ["--snapshot-every", EVERY, "--checkpoint", f"{tier},every={EVERY}"]
    process = paused_at(tmp_path, 65, *options)
    job_dir = tmp_path / "jobs" / "job"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(job_dir, "wrong")
    seen = scrape(job_dir, (job_dir / "token").read_text())
    assert seen[("holdfast_world_size",)] == 3
    assert 60 <= seen[("holdfast_step",)] <= 65
    # Rank 0 tells the losses of its steps 20 times a second, so those of the last 50 ms may still be on their way.
    assert 50 <= seen[("holdfast_steps_committed_total",)] <= seen[("holdfast_step",)]
    assert seen[("holdfast_time_seconds", "productive")] > 0
    assert seen[("holdfast_saved_step", "peer")] >= 65 - 2 * EVERY
    assert 0 < seen[("holdfast_saved_age_seconds", "peer")] < 100
    assert seen[("holdfast_saved_step", str(tier))] >= EVERY
    assert seen[("holdfast_checkpoint_bytes_total", str(tier))] > 10_000
    assert seen[("holdfast_snapshot_duration_seconds_count",)] >= 3
    assert seen[("holdfast_tier_failing", str(tier))] == 0
    kill_all(tmp_path, process)  # a job that stands still takes a while to end in order
