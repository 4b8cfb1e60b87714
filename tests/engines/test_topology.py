"""Where nodes stand: read from a file, from Slurm and from the environment, and refused with the line that is wrong."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.__main__ import main as agent
from holdfast.cli.spec import plan_places
from holdfast.engines.local import Local
from holdfast.engines.run_options import NodeOptions
from holdfast.engines.slurm import Slurm
from holdfast.engines.ssh import Ssh
from holdfast.engines.topology import expand, parse_topology, place_of_variables, read_topology
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import SlurmOptions, SshOptions
from holdfast.protocol.place import PLACE_VARIABLE, common, nearness, parse_place, shown

TREE = """SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[01-02]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[03-04],gpu
SwitchName=core Level=1 LinkSpeed=1 Nodes=n[01-04],gpu Switches=leaf[0-1]
"""


def test_a_file_of_lines():
    text = "# the first hall\nnode[08-11,20] zone-a/rack7  # half full\n\nlogin zone-b\n"
    found = parse_topology(text)
    assert found["node08"] == found["node11"] == found["node20"] == ("zone-a", "rack7")
    assert found["login"] == ("zone-b",)
    assert len(found) == 6


def test_what_slurm_prints_of_a_tree():
    found = parse_topology(TREE)
    assert found["n01"] == found["n02"] == ("core", "leaf0")
    assert found["gpu"] == ("core", "leaf1")
    assert len(found) == 5


def test_what_slurm_prints_of_blocks():
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n3 BlockSize=2\nBlockSizes=2,4\n"
    assert parse_topology(text) == {"n1": ("b1",), "n2": ("b1",), "n3": ("b2",)}


def test_lists_of_hosts():
    assert list(expand("a[1-3,07],b,c[0-1]d[8-9]")) == [
        *("a1", "a2", "a3", "a07", "b"),
        *("c0d8", "c0d9", "c1d8", "c1d9"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "three fields": ("a z\nb z/r 7\n", "line 2: 3 fields"),
        "one field": ("a\n", "line 1: 1 fields"),
        "an empty name": ("a z//r\n", "line 1, field place: .* an empty name"),
        "too many levels": (
            "a 1/2/3/4/5/6/7/8/9\n",
            "line 1, field place: a place can have at most 8 levels",
        ),
        "a range backwards": ("n[9-1] z\n", r"line 1, field hosts: \[9-1\]: 1 is before 9"),
        "no range": ("n[a-b] z\n", "line 1, field hosts: .* is not a range"),
        "open brackets": ("n[1-2 z\n", "line 1, field hosts: .* brackets that are not closed"),
        "no host": ("-oProxy z\n", "line 1, field hosts: '-oProxy' is not a valid name of a host"),
        "two places": (
            "n[1-3] z/a\nn2 z/b\n",
            "line 2, field hosts: n2 has the place 'z/b' here and 'z/a' in an earlier line",
        ),
        "too many": ("n[1-999999999] z\n", "line 1, field hosts: .* more than 100000 hosts"),
        "a product that is too large": (
            "n[1-9999][1-9999] z\n",
            "line 1, field hosts: more than 100000 hosts",
        ),
        "a circle of switches": (
            "SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=c Nodes=n1\nSwitchName=a Switches=c\n",
            "line 3, field Switches: c is below itself",
        ),
    }.values(),
)
def test_what_is_wrong_is_said_with_its_line_and_field(text, said):
    with pytest.raises(ValueError, match=said):
        parse_topology(text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_topology(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UsageError, match="does not contain any hosts"):
        read_topology(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not a text file"):
        read_topology(tmp_path / "binary")


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        found = parse_topology(text)
    except ValueError:
        return
    assert all(parse_place(shown(place)) == place for place in found.values())


@pytest.mark.parametrize(
    ("address", "pattern", "place"),
    [
        ("core.leaf1.n03", "switch.switch.node", ("core", "leaf1")),
        (".leaf1.n03", "switch.switch.node", ("leaf1",)),
        ("b1.n03.example.org", "block.node", ("b1",)),
        ("n03", "node", ()),
        ("n03", "switch.node", ()),
        ("", "", ()),
    ],
)
def test_what_slurm_tells_a_process(address, pattern, place):
    told = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert place_of_variables(told) == place


def test_only_hosts_that_may_be_the_jobs_count(tmp_path):
    file = tmp_path / "topology"
    file.write_text("node[0-3] a\nhost[1-2] b\n")
    options = NodeOptions(topology=file)
    local = Local().nodes(None)
    assert set(plan_places(options, local)) == {"node0", "node1", "node2", "node3"}
    assert plan_places(options, Ssh().nodes(SshOptions(hosts=("host2", "me@other")))) == {"host2": ("b",)}
    assert len(plan_places(options, Slurm().nodes(SlurmOptions()))) == 6
    with pytest.raises(UsageError, match="does not name any of this job's nodes, which are x1, x2"):
        plan_places(options, Ssh().nodes(SshOptions(hosts=("x1,x2",))))
    with pytest.raises(UsageError, match="pass only one of them"):
        plan_places(NodeOptions(topology=file, racks=2), local)


def test_a_bad_variable_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(PLACE_VARIABLE, "zone a/rack")
    with pytest.raises(UsageError, match=f"{PLACE_VARIABLE}: .* the name 'zone a'"):
        plan_places(NodeOptions(), Local().nodes(None))
    (tmp_path / "token").write_text("secret")
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(JobSpec(name="job", script="train.py")))
    with pytest.raises(SystemExit):
        agent(["--node=a", f"--job-dir={tmp_path}", f"--memory={tmp_path}"])
    assert PLACE_VARIABLE in capsys.readouterr().err


def test_what_places_share():
    assert common([("z", "a"), ("z", "b")]) == ("z",)
    assert common([("z", "a"), ("z", "a")]) == ("z", "a")
    assert common([("z", "a"), ()]) == common([]) == ()
    assert nearness(("z", "a"), ("y", "a")) == nearness((), ()) == 0
    assert nearness(("z",), ("z", "a")) == 1
