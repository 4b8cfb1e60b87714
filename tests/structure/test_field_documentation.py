"""What a field of a record means stands under the field, where its reader looks and where it is changed with it.

The docstring of the class says what the class is and what always holds. It may name fields in its sentences; it has no list of
them: neither `field: what it means` (also `a, b: what they mean`) at the begin of a line or a sentence, nor a section
`Attributes:`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from imports import modules_of
from test_keyword_only import fields, is_record

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
_DECLARES = frozenset({"NamedTuple", "TypedDict", "Protocol"})
_SECTION = re.compile(r"^\s*Attributes:\s*$", re.M)


def declares_fields(cls: ast.ClassDef) -> bool:
    """A record, or a class whose annotations say what others must have: a section of its docstring could go stale beside
    them. The attributes of any other class are made in its methods, and have no other place than the docstring."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in cls.bases}
    return is_record(cls) or bool(bases & _DECLARES)


def listed(cls: ast.ClassDef) -> list[str]:
    """What the docstring of a class lists of its fields."""
    docstring, names = ast.get_docstring(cls), fields(cls)
    if docstring is None or not names or not declares_fields(cls):
        return []
    name = "`?(?:" + "|".join(map(re.escape, names)) + ")`?"
    entry = re.compile(
        rf"(?:^|[.;:?!]\s)\s*(?:[-*]\s+)?({name}(?:(?:,| and)\s+{name})*)(?: \([^)]*\))?:\s", re.M
    )
    return [*entry.findall(docstring), *(found.strip() for found in _SECTION.findall(docstring))]


def lists(module_name: str, tree: ast.Module) -> Iterator[str]:
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef) and (found := listed(cls)):
            yield f"{module_name}.{cls.name}: {'; '.join(found)}"


def test_fields_are_described_where_they_are() -> None:
    assert [one for module in modules_of(PACKAGE) for one in lists(module.name, module.tree)] == []


def test_a_list_of_fields_is_found() -> None:
    body = "    size: int\n    blocks: int\n"
    docstrings = {
        "Sentence": "What it is. size: bytes of it.",
        "Line": "What it is.\n\n    blocks: of it.\n    ",
        "Two": "What it is; size, blocks: both.",
        "Marked": "What it is.\n\n    - `size` (bytes): of it.\n    ",
        "First": "size: of it. And more.",
        "Attributes": "What it is.\n\n    Attributes:\n        other: of it.\n    ",
        "Prose": "What it is: of `size` bytes, in blocks. It has this size: the largest. Other: no field.",
        "Raises": "What it is.\n\n    Raises:\n        ValueError: size is negative.\n    ",
    }
    records = "".join(
        f'class {name}(msgspec.Struct):\n    """{text}"""\n{body}' for name, text in docstrings.items()
    )
    found = [one.partition(":")[0] for one in lists("x", ast.parse(records))]
    assert found == ["x.Sentence", "x.Line", "x.Two", "x.Marked", "x.First", "x.Attributes"]


def test_only_classes_that_declare_fields_are_looked_at() -> None:
    body = '    """Attributes:\n        size: of it.\n    """\n    size: int\n'
    source = (
        f"class Plain:\n{body}@dataclass(frozen=True)\nclass Data:\n{body}class Asked(Protocol):\n{body}"
        f"class Row(NamedTuple):\n{body}class Generic(Protocol[T]):\n{body}class Keys(typing.TypedDict):\n{body}"
    )
    found = [one.partition(":")[0] for one in lists("x", ast.parse(source))]
    assert found == ["x.Data", "x.Asked", "x.Row", "x.Generic", "x.Keys"]
