"""What is known of a script before anything runs."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.train.imports import read_at_import


def read_script(script: str, module: bool) -> ast.Module | None:
    """Its syntax; None for a module, and for what is compiled or packed.

    Raises:
        UsageError: there is no such script, or Python cannot compile it.
    """
    if module:
        if not importable(script):
            raise UsageError(f"the module {script!r} was not found; is its folder on PYTHONPATH?")
        return None
    path = Path(script)
    if path.is_dir():
        raise UsageError(
            f"{script!r} is a folder; specify the training script in it, for example {script}/train.py"
        )
    if not path.is_file():
        hint = "; use -m to run a module" if "/" not in script and not script.endswith(".py") else ""
        raise UsageError(f"the script {script!r} does not exist in {Path.cwd()}{hint}")
    return _syntax(path)


def _syntax(path: Path) -> ast.Module | None:
    # Nothing of it is run. Found by a worker, an error would cost the imports of all nodes first.
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"the script {path} cannot be read: {error.strerror}; check its permissions"
        ) from None
    try:
        with warnings.catch_warnings():
            # The workers show them. Here they would stand in front of the job's lines.
            warnings.simplefilter("ignore")
            tree = ast.parse(source, str(path))
            compile(tree, str(path), "exec", dont_inherit=True)
            return tree
    except (SyntaxError, ValueError) as error:
        # Python runs archives and compiled files, too.
        if source.startswith(importlib.util.MAGIC_NUMBER) or zipfile.is_zipfile(path):
            return None
        # A ValueError: Python 3.11 has no SyntaxError for a NUL byte.
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            f"the script {path}{line}: SyntaxError: {words}; correct the script, and start again"
        ) from None


def importable(module: str) -> bool:
    """Where workers find it: in the environment, or in this folder; which this process looks into last, and only now."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.remove(here)


def set_before_import(tree: ast.Module) -> tuple[str, int] | None:
    """A variable that torch reads as it is imported, and the line of the script that sets it; None: it sets none. Only what is
    written out is seen, and only in this file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            for name in filter(read_at_import, _set_by(node)):
                return name, node.lineno
    return None


def _set_by(node: ast.AST) -> Iterator[str]:
    """Names of variables that a statement or an expression writes into `os.environ`."""
    match node:
        case ast.Assign(targets=targets):
            for target in targets:
                match target:
                    case ast.Subscript(value=where, slice=ast.Constant(value=str(name))) if _environ(where):
                        yield name
        case ast.AugAssign(target=where, value=ast.Dict(keys=keys)) if _environ(where):
            yield from _texts(keys)
        case ast.Call(
            func=ast.Attribute(value=where, attr="setdefault"), args=[ast.Constant(value=str(name)), *_]
        ):
            # One that is set has its value.
            if _environ(where) and name not in os.environ:
                yield name
        case ast.Call(func=ast.Attribute(value=where, attr="update"), args=args, keywords=words):
            if _environ(where):
                yield from (word.arg for word in words if word.arg)
                yield from (n for each in args if isinstance(each, ast.Dict) for n in _texts(each.keys))
        case ast.Call(func=ast.Attribute(attr="putenv"), args=[ast.Constant(value=str(name)), *_]):
            yield name


def _environ(where: ast.AST) -> bool:
    match where:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
    return False


def _texts(keys: list[ast.expr | None]) -> Iterator[str]:
    yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
