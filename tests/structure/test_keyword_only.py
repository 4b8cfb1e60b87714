"""Structs and dataclasses of more than four fields are built by keyword: two values of one type that change places go
unnoticed by the type checker, and a field that is added in the middle would shift those after it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from imports import modules_of

MOST_POSITIONAL = 4
PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
POSITIONAL: dict[str, str] = {}
"""Exceptions, with the reason."""


def is_record(cls: ast.ClassDef) -> bool:
    """A dataclass, or a msgspec struct: also one that inherits from a struct of ours, which has class options."""
    decorated = any("dataclass" in ast.unparse(one) for one in cls.decorator_list)
    return decorated or bool(cls.keywords) or any("Struct" in ast.unparse(base) for base in cls.bases)


def is_keyword_only(cls: ast.ClassDef) -> bool:
    calls = [one for one in cls.decorator_list if isinstance(one, ast.Call)]
    options = [*cls.keywords, *(option for call in calls for option in call.keywords)]
    return any(option.arg == "kw_only" and ast.unparse(option.value) == "True" for option in options)


def fields(cls: ast.ClassDef) -> list[str]:
    return [
        ast.unparse(one.target)
        for one in cls.body
        if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation)
    ]


def positional(module_name: str, tree: ast.Module) -> Iterator[str]:
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef) or not is_record(cls) or is_keyword_only(cls):
            continue
        if len(fields(cls)) > MOST_POSITIONAL:
            yield f"{module_name}.{cls.name}"


def test_records_of_many_fields_are_keyword_only() -> None:
    found = {name for module in modules_of(PACKAGE) for name in positional(module.name, module.tree)}
    assert found == set(POSITIONAL)


def test_a_positional_record_is_found() -> None:
    body = "    a: int\n    b: int\n    c: int\n    d: int\n"
    source = (
        f"class Small(msgspec.Struct):\n{body}"
        f"class Large(msgspec.Struct, frozen=True):\n{body}    e: int = 0\n"
        f"class Keywords(msgspec.Struct, kw_only=True):\n{body}    e: int = 0\n"
        f"@dataclass\nclass Data:\n{body}    e: int\n"
        f"@dataclass(frozen=True, kw_only=True)\nclass KeywordData:\n{body}    e: int\n"
        f"@dataclass(kw_only=False)\nclass Positional:\n{body}    e: int\n"
        f"class Plain:\n{body}    e: int\n"
    )
    assert list(positional("x", ast.parse(source))) == ["x.Large", "x.Data", "x.Positional"]
