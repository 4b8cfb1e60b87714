"""Rules and sources agree on what readings are called."""

import ast
import re
from importlib import resources
from pathlib import Path

from machines import Hand
from test_network_source import interface, port

from holdfast.health.network import Interfaces
from holdfast.health.rdma import Rdma
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import load_rules
from holdfast.health.sources import MachineRoot

OTHERS = {"worker", "peers"}
"""Sources that are not of the machine."""


def patterns():
    """Every string in the sources, with anything where an f-string has a value."""
    for path in Path(str(resources.files("holdfast.health"))).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.escape(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (re.escape(p.value) if isinstance(p, ast.Constant) else r"\w+" for p in node.values)
                yield "".join(parts)


def test_every_reading_that_a_rule_is_about_is_read():
    known = re.compile("|".join(p for p in patterns() if "\\." in p))
    named = {rule.reading for rule in load_rules() if rule.reading and rule.source not in OTHERS}
    assert named
    assert not {name for name in named if not known.fullmatch(name)}


def found(engine, source, now_s):
    return [f.rule for reading in source.read() for f in engine.on_reading(reading, now_s)]


def test_a_link_is_lost_only_if_it_was_there(tmp_path):
    """A port that nobody plugged a cable into is no fault, nor is one that was taken down on purpose."""
    clock = Hand()
    interface(tmp_path, "eth0")
    interface(tmp_path, "eth1", carrier="0")
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN")
    engine = RuleEngine(load_rules())
    sources = [Interfaces(MachineRoot(tmp_path), clock), Rdma(MachineRoot(tmp_path))]
    for now_s in (0.0, 30.0, 60.0):
        assert [rule for source in sources for rule in found(engine, source, now_s)] == []
    interface(tmp_path, "eth0", carrier="0")
    port(tmp_path, "mlx5_0", state="1: DOWN")
    assert [rule for source in sources for rule in found(engine, source, 90.0)] == []
    assert [rule for source in sources for rule in found(engine, source, 120.0)] == ["net-down", "rdma-down"]
    interface(tmp_path, "eth0")
    port(tmp_path, "mlx5_0", rate="200 Gb/sec (2X NDR)")
    healed = [f for source in sources for r in source.read() for f in engine.on_reading(r, 150.0)]
    assert [(f.rule, str(f.condition)) for f in healed] == [
        ("net-down", "healthy"),
        ("rdma-down", "healthy"),
        ("rdma-slow-port", "faulty"),
    ]
