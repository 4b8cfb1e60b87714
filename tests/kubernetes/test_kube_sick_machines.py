"""How many machines are left because a condition calls them sick."""

import random
from typing import Any

from liveapi import LiveApi
from operating import PODS, operated
from test_kube_reconcile import actions, observed, said

from holdfast.kubernetes.objects.machine import MachineSeen
from holdfast.kubernetes.policy.machines import SICK_HELD, braked
from holdfast.kubernetes.policy.plan import MakeNode, Tell, Warn
from holdfast.protocol.engine_orders import NodeGoing

XID = "the condition HoldfastHealth: Xid 79"


def sick(name: str, since: str = "2026-01-01T00:00:00Z", **fields: Any) -> MachineSeen:
    return MachineSeen(name=name, sick=XID, sick_since=since, **fields)


def after(machines: dict[str, MachineSeen], percent: int) -> dict[str, MachineSeen]:
    changed = machines | {one.name: one for one in braked(machines, percent)}
    assert not list(braked(changed, percent)), "it is done"
    return changed


def test_those_that_were_called_sick_first_are_left() -> None:
    machines = {f"m{k}": MachineSeen(name=f"m{k}") for k in range(20)}
    for k, minute in ((7, 3), (3, 1), (12, 2)):
        machines[f"m{k}"] = sick(f"m{k}", f"2026-01-01T00:0{minute}:00Z")
    machines["m5"] = MachineSeen(name="m5", going="it is cordoned")
    seen = after(machines, 10)
    assert {name for name, one in seen.items() if one.why_left} == {"m3", "m12", "m5"}
    assert seen["m7"].held == "3 of 20 machines are called sick, and at most 10% are left for that (2)"
    assert not seen["m7"].is_avoided
    # One is well again, so there is room for the next.
    seen = after(seen | {"m3": MachineSeen(name="m3")}, 10)
    assert (seen["m7"].why_left, seen["m7"].held) == (XID, None)


def test_a_cordon_counts_on_a_machine_that_stays_in_use() -> None:
    machines = {"m1": sick("m1"), "m2": sick("m2", going="it is cordoned")}
    assert after(machines, 10)["m2"].why_left == "it is cordoned"


def test_never_more_than_the_share_and_always_one() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        machines: dict[str, MachineSeen] = {}
        percent = dice.randrange(1, 101)
        for _ in range(100):
            name = f"m{dice.randrange(30)}"
            match dice.choice(("sick", "well", "gone")):
                case "sick":
                    machines[name] = sick(name, f"2026-01-01T00:00:{dice.randrange(60):02d}Z")
                case "well":
                    machines[name] = MachineSeen(name=name)
                case _:
                    machines.pop(name, None)
            machines = after(machines, percent)
            left = [one for one in machines.values() if one.is_avoided]
            all_sick = [one for one in machines.values() if one.sick is not None]
            assert len(left) == min(len(all_sick), max(1, len(machines) * percent // 100)), f"seed {seed}"
            first = sorted(all_sick, key=lambda one: (one.sick_since, one.name))[: len(left)]
            assert sorted(one.name for one in left) == sorted(one.name for one in first), f"seed {seed}"


def test_a_job_stays_on_a_machine_beyond_the_share_and_says_so() -> None:
    machines = {name: MachineSeen(name=name) for name in ("m-c1", "m-n0", "m-n2")}
    machines |= {"m-n1": sick("m-n1", held="2 of 4"), "free": sick("free", held="2 of 4")}
    seen = observed(machines=machines)
    (warned,) = actions(seen)
    text = f"m-n1 stays in use, and is called sick ({XID}): 2 of 4"
    assert warned == Warn(reason=SICK_HELD, text=text, about="m-n1 since 2026-01-01T00:00:00Z")
    missing = observed(
        machines=machines, pods=seen.pods[:-1], said=said("n0", "n1"), granted=frozenset({"llm-n3"})
    )
    assert [one.avoid for one in actions(missing) if isinstance(one, MakeNode)] == [frozenset()]
    machines["m-n1"] = sick("m-n1")
    left = actions(observed(machines=machines))
    assert [one.news.node for one in left if isinstance(one, Tell) and isinstance(one.news, NodeGoing)] == [
        "llm-n1"
    ]


def test_the_operator_holds_and_lets_go() -> None:
    def node(name: str, minute: int, status: str = "True") -> dict[str, Any]:
        at = f"2026-01-01T00:0{minute}:00Z"
        said = {"type": "HoldfastHealth", "status": status, "message": "Xid 79", "lastTransitionTime": at}
        return {"metadata": {"name": name}, "status": {"conditions": [said]}}

    def avoided(fake: LiveApi, name: str) -> list[str]:
        affinity = fake.objects[f"{PODS}/{name}"]["spec"]["affinity"].get("nodeAffinity", {})
        terms = [terms for one in affinity.values() for terms in one["nodeSelectorTerms"]]
        return [value for one in terms for each in one["matchExpressions"] for value in each["values"]]

    async def scene(fake: LiveApi, restart: Any) -> None:
        for name, minute in (("m1", 2), ("m2", 1), ("m3", 3)):
            await fake.put(f"/api/v1/nodes/{name}", node(name, minute), "ADDED")
        await restart()
        await fake.until(lambda: "llm-n0" in fake.named("pods"))
        path = f"{PODS}/llm-n0"
        await fake.put(path, {**fake.objects[path], "spec": {**fake.objects[path]["spec"], "nodeName": "m1"}})
        await fake.until(lambda: any(one.get("reason") == SICK_HELD for one in fake.objects.values()))
        (event,) = (one for one in fake.objects.values() if one.get("reason") == SICK_HELD)
        assert event["message"].startswith("m1 stays in use"), event
        await fake.remove(f"{PODS}/llm-n1")
        await fake.until(lambda: "llm-n3" in fake.named("pods"))
        assert avoided(fake, "llm-n3") == ["m2"]
        await fake.put("/api/v1/nodes/m2", node("m2", 4, "False"))
        await fake.remove(f"{PODS}/llm-n2")
        await fake.until(lambda: "llm-n4" in fake.named("pods"))
        assert avoided(fake, "llm-n4") == ["m1"]
        await fake.remove("/api/v1/nodes/m1")
        await fake.remove(f"{PODS}/llm-n3")
        await fake.until(lambda: "llm-n5" in fake.named("pods"))
        assert avoided(fake, "llm-n5") == ["m3"]

    operated(scene)
