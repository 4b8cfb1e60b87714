"""A job is specified once. Options, the specification, an object of Kubernetes and what an agent is started with are lists of the same
things: what one of them declares, the others take from there, or say here why they cannot."""

import dataclasses
import typing
from typing import Any

import msgspec
import pytest

from holdfast.agent.__main__ import parser
from holdfast.engines.run_options import RunOptions
from holdfast.kubernetes.objects.check import convert
from holdfast.kubernetes.objects.render import job_spec
from holdfast.kubernetes.objects.resource import JOB_PARTS, HoldfastJobSpec, job_part, name_in_object
from holdfast.kubernetes.objects.schema import in_object, job_schema
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import HealthSpec, SlurmOptions, SshOptions
from holdfast.protocol.options import declared, is_options
from holdfast.protocol.snapshots import Saving

OF_THE_NODE = {
    "node": "its name",
    "job_dir": "where the rest is read",
    "coordinator": "where this node reaches it",
    "host": "its address",
    "memory": "its folder of snapshot memory",
    "place": "where its engine sees it stand",
    "grace": "what its scheduler gives it",
    "ready_port": "where its pod is asked",
    "coordinator_is_late": "how its engine starts it",
    "shared_machine": "what is beside it",
    "lifeline": "a descriptor of its process",
    "log_file": "a file of its own",
}
PARSED = {
    "name": "--job, or made of the script's name",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "nproc": "--nproc-per-node, or counted",
    "preload": "a text of several modules, or none where the script sets a variable of torch",
    "faults": "--fault, each parsed",
    "cwd": "no option: where the command runs",
    "places": "--topology, a file",
    "engine_options": "of an engine of another package, by its own names",
    "log_limit": "--log-limit, in bytes",
    "log": "--log-level, or the environment",
    "budget_bytes": "--snapshot-memory, in bytes",
    "tiers": "--checkpoint, each parsed",
}
OF_THE_OBJECT = {
    "run": "a script or a module, with the files that are sent along",
    "template": "a pod's",
    "nodes": "a number, which `kubectl scale` changes",
    "min_nodes": "absent: as many as nodes",
    "spares": "bounded, as every number of an object",
    "wait_for_spare": "with a rule: there are spares",
    "procs_per_node": "a number or a word; counted by the template's limits",
    "faults": "as the command line has them",
    "run_policy": "how long the object lives; with max_restarts",
    "disruption": "Kubernetes' own",
    "topology": "Kubernetes' own",
    "scheduling": "Kubernetes' own",
    "coordinator": "a pod's",
}


def groups(options: Any) -> set[Any]:
    """The dataclasses within one."""
    fields = {name: kind for name, kind in typing.get_type_hints(options).items() if is_options(kind)}
    return {*fields.values(), *(one for kind in fields.values() for one in groups(kind))}


def innermost(kind: Any) -> type:
    """Of a list of them, or one with bounds."""
    while typing.get_args(kind):
        kind = typing.get_args(kind)[0]
    return kind


def test_an_agent_is_told_what_is_its_nodes_own():
    told = {action.dest: action for action in parser()._actions if action.dest != "help"}
    assert set(told) == set(OF_THE_NODE), "what all nodes have alike is in spec.json, which the agent reads"
    flags = {flag for option in declared(RunOptions) for flag in option.flags}
    assert not flags & {flag for action in told.values() for flag in action.option_strings}


def test_a_field_of_the_specification_is_an_option_or_made_of_one():
    """An option of the same name has the same type and default; a group of options is a part as it is."""
    options = {one.name: one for one in declared(RunOptions)}
    parts = {*groups(RunOptions), SlurmOptions, SshOptions, Saving}
    made = set()
    for field in (*msgspec.structs.fields(JobSpec), *msgspec.structs.fields(Saving)):
        if field.type in parts:
            continue
        option = options.get(field.name)
        if option is None or option.type != field.type:
            made.add(field.name)
        elif not field.required:
            assert field.default == option.default, field.name
    assert made == set(PARSED)


def test_no_option_stands_beside_a_group_that_has_it():
    names = {field.name for part in (JobSpec, Saving) for field in msgspec.structs.fields(part)}
    for part in {*groups(RunOptions)} & {field.type for field in msgspec.structs.fields(JobSpec)}:
        assert not names & {one.name for one in declared(part)}, part


def test_an_object_shares_parts_with_the_specification_and_says_what_else_it_has():
    own = set()
    for field in msgspec.structs.fields(HoldfastJobSpec):
        if not job_part(innermost(field.type)):
            own.add(field.name)
    assert own == set(OF_THE_OBJECT)


@pytest.mark.parametrize("part", JOB_PARTS, ids=lambda part: part.__name__)
def test_a_shared_part_has_the_bounds_and_defaults_of_its_options(part):
    there = find(job_schema()["properties"]["spec"], part)
    fields = {field.name: field for field in (dataclasses.fields(part) if is_options(part) else ())}
    assert set(JOB_PARTS[part].left_out) <= set(fields)
    for option in declared(part) if is_options(part) else ():
        if option.name in JOB_PARTS[part].left_out:
            assert name_in_object(option.name) not in there
            continue
        schema, bounds = there[name_in_object(option.name)], JOB_PARTS[part].bounds.get(option.name, {})
        assert schema.get("minimum") == bounds.get("minimum", option.option.least)
        assert schema.get("maximum") == bounds.get("maximum", option.option.most)
        assert schema.get("pattern", "") == option.option.pattern
        assert schema.get("default", ()) == option.default
        for key, bound in (("minimum", option.option.least), ("maximum", option.option.most)):
            assert bound is None or key not in bounds, f"{option.name}: its option says {key}"


def find(schema: dict[str, Any], part: type) -> dict[str, Any]:
    """The properties of a part, by the object's field that has it."""
    for field in msgspec.structs.fields(HoldfastJobSpec):
        if issubclass(innermost(field.type), part):
            there = schema["properties"][field.encode_name]
            return there.get("items", there)["properties"]
    raise AssertionError(f"{part}: no field of the object has it")


def least() -> dict[str, Any]:
    """The shortest object."""
    template = {"spec": {"containers": [{"name": "worker", "image": "me/train:1"}]}}
    return {"metadata": {"name": "job"}, "spec": {"run": {"script": "train.py"}, "template": template}}


def test_what_an_object_does_not_say_is_what_a_specification_has_by_default():
    assert job_spec(convert(least())) == JobSpec(name="job", script="train.py", engine="kubernetes")


def test_a_part_is_the_same_in_an_object():
    health = HealthSpec(dry_run=("*",), blast_radius="0.5", deep_checks=True, replace_slow=1.5)
    made = least()
    made["spec"]["health"] = in_object(health)
    made["spec"]["timing"] = {"detectionSeconds": 3}
    spec = job_spec(convert(made))
    assert (spec.health, spec.timing.detection_s) == (health, 3.0)
    assert in_object(spec.timing) == made["spec"]["timing"]
    # As the operator keeps it while a run lasts.
    made["spec"] |= {"checkpoints": [{"url": "/a", "keepEvery": 5}], "snapshots": {"copies": 0}, "nodes": 2}
    assert in_object(convert(made).spec) == made["spec"]
    assert convert({**made, "spec": in_object(convert(made).spec)}) == convert(made)
