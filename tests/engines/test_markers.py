"""How a machine knows the folders that it shares with the launcher's."""

from holdfast.engines.folders import Markers, find_tier_problem, is_marked
from holdfast.protocol.job import JobSpec
from holdfast.protocol.snapshots import DurableTier, Saving


def spec_of(tmp_path) -> JobSpec:
    tiers = (DurableTier(url=f"file://{tmp_path / 'tier'}"),)
    return JobSpec(name="job", script="train.py", saving=Saving(tiers=tiers))


def test_a_folder_is_shared_while_it_is_marked_by_this_name(tmp_path):
    own, tier = tmp_path / "job", str(tmp_path / "tier")
    with Markers(spec_of(tmp_path), own, "a1"):
        assert is_marked(own, "a1")
        assert find_tier_problem(tier, own, True, "a1") == ""
        assert "is not shared" in find_tier_problem(tier, own, True, "b2")
    assert "is not shared" in find_tier_problem(tier, own, True, "a1")


def test_a_launcher_removes_what_a_killed_one_of_its_job_left(tmp_path):
    Markers(spec_of(tmp_path), tmp_path / "job", "a1").__enter__()  # and is killed
    with Markers(spec_of(tmp_path), tmp_path / "job", "a1"):
        pass
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
