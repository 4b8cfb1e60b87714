"""A job is specified once: what one list says, no other says again."""

from holdfast.agent.__main__ import parser
from holdfast.engines.run_options import RunOptions
from holdfast.protocol.options import declared

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


def test_an_agent_is_told_what_is_its_nodes_own():
    told = {action.dest: action for action in parser()._actions if action.dest != "help"}
    assert set(told) == set(OF_THE_NODE), "what all nodes have alike is in spec.json, which the agent reads"
    flags = {flag for option in declared(RunOptions) for flag in option.flags}
    assert not flags & {flag for action in told.values() for flag in action.option_strings}
