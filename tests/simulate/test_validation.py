from holdfast.tools.simulate.validation import validate


def test_what_can_be_reproduced_is():
    checks = validate(trials=1000)
    assert [c.name for c in checks if c.reproduced is False] == []
    assert sum(c.name.startswith("formula, simulation") for c in checks) == 12
    assert {c.name.split(":")[0] for c in checks if c.reproduced is None} == {
        "ByteRobust",
        "OPT-175B",
        "Meta RSC-1",
        "Llama 3",
    }
