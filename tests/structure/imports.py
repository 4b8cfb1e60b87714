"""Who imports whom in a tree of sources, read from the syntax: an import that runs when its module is loaded, one that runs
when a function is called, and one that only a type checker reads.

A parent package counts only where it is named: `from holdfast.checkpoint import placement` leads to the module
`placement` and not to the package, whose `__init__` gathers names for users.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

LOADED, CALLED, TYPES = "loaded", "called", "types"  # when an import runs: on load, in a function, never
EVERY = frozenset({LOADED, CALLED, TYPES})
AT_RUN_TIME = frozenset({LOADED, CALLED})


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    kind: str
    line: int


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module


def modules_of(package: Path) -> list[Module]:
    """Every module below the folder of one top package."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, _parsed(path, path.stat().st_mtime_ns)))
    return found


@functools.cache
def _parsed(path: Path, changed_ns: int) -> ast.Module:
    """Six tests look at every module."""
    return ast.parse(path.read_text(), str(path))


def imports_of(modules: list[Module]) -> list[Import]:
    """The imports between `modules`; those of other projects are left out."""
    names = {module.name for module in modules}
    return [one for module in modules for one in _within(module, names) if one.imported != module.name]


def _within(module: Module, names: Collection[str]) -> Iterator[Import]:
    stack: list[tuple[ast.AST, str]] = [(module.tree, LOADED)]
    while stack:
        node, kind = stack.pop()
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = _source(module, node)
            inside = [f"{source}.{alias.name}" for alias in node.names]
            targets = [one if one in names else source for one in inside]
        else:
            targets = []
        for target in sorted(set(targets) & set(names)):
            yield Import(module.name, target, kind, node.lineno)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += [(child, TYPES) for child in node.body]
            stack += [(child, kind) for child in node.orelse]
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == LOADED:
            kind = CALLED
        stack += [(child, kind) for child in ast.iter_child_nodes(node)]


def _source(module: Module, node: ast.ImportFrom) -> str:
    """What is imported from, by its full name. This project writes it; others begin with dots."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - (module.path.name == "__init__.py")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def package_of(module: str, depth: int = 2) -> str:
    return ".".join(module.split(".")[:depth])


def circles(arrows: Collection[tuple[str, str]]) -> list[list[str]]:
    """The groups of names that reach each other along the arrows, the largest first (Tarjan's components of two or more,
    without recursion)."""
    onward: dict[str, list[str]] = defaultdict(list)
    for one, other in sorted(set(arrows)):
        if one != other:
            onward[one].append(other)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    open_: set[str] = set()
    groups: list[list[str]] = []
    for root in sorted(onward):
        if root in number:
            continue
        number[root] = low[root] = len(number)
        path.append(root)
        open_.add(root)
        calls = [(root, iter(onward[root]))]
        while calls:
            name, rest = calls[-1]
            for following in rest:
                if following not in number:
                    number[following] = low[following] = len(number)
                    path.append(following)
                    open_.add(following)
                    calls.append((following, iter(onward.get(following, ()))))
                    break
                if following in open_:
                    low[name] = min(low[name], number[following])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[name])
                if low[name] == number[name]:
                    cut = path.index(name)
                    group, path = path[cut:], path[:cut]
                    open_ -= set(group)
                    if len(group) > 1:
                        groups.append(sorted(group))
    return sorted(groups, key=lambda group: (-len(group), group))


def arrows(imports: list[Import], kinds: Collection[str], depth: int | None = None) -> set[tuple[str, str]]:
    """The imports of these kinds as pairs: of modules, or with `depth` of the packages at that depth of the name."""
    pairs = {(one.importer, one.imported) for one in imports if one.kind in kinds}
    if depth is not None:
        pairs = {(package_of(one, depth), package_of(other, depth)) for one, other in pairs}
    return {(one, other) for one, other in pairs if one != other}
