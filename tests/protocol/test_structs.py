"""How the structs that outlive a process are built."""

import inspect

import msgspec
import pytest

from holdfast.protocol import messages

FEW = 4
"""A struct of more fields takes keywords only: nobody reads the eighth argument of a call."""

STRUCTS = {
    name: struct
    for name, struct in inspect.getmembers(messages, inspect.isclass)
    if issubclass(struct, msgspec.Struct) and struct.__module__.startswith(messages.__name__)
}


def test_all_messages_are_looked_at():
    assert len(STRUCTS) > 50


@pytest.mark.parametrize("name", sorted(n for n, s in STRUCTS.items() if len(s.__struct_fields__) > FEW))
def test_a_message_of_many_fields_is_built_by_keyword(name):
    struct = STRUCTS[name]
    assert struct.__match_args__ == (), f"give {name} kw_only=True"
