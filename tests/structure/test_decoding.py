"""What did not come from this process's own memory is decoded at one place, which bounds it and fails in one way.

Read from the syntax. A function that decodes may be named only where it is handed to `decode` or `decode_file`: as their first
argument, within it, or in a function or variable that is used for nothing else.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import modules_of

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
PLACE = "holdfast.protocol.wire.decoding"
TAKERS = {f"{PLACE}.decode", "holdfast.protocol.wire.stored.decode_file"}
DECODING = {
    *(f"msgspec.{kind}.decode" for kind in ("json", "msgpack", "yaml", "toml")),
    "msgspec.convert",
    *(
        f"{name}.{how}"
        for name in ("json", "tomllib", "pickle", "marshal", "torch", "numpy")
        for how in ("load", "loads")
    ),
    *("json.JSONDecoder", "pickle.Unpickler", "numpy.fromfile", "numpy.lib.format.open_memmap"),
    *(
        f"yaml.{name}"
        for name in ("load", "load_all", "safe_load", "safe_load_all", "full_load", "unsafe_load")
    ),
    *("ast.literal_eval", "base64.b64decode", "bytes.fromhex", "datetime.datetime.fromisoformat"),
    *("eval", "exec"),
}
STARS = {f"{name.rpartition('.')[0]}.*" for name in DECODING}
DECODERS = {"msgspec.json.Decoder", "msgspec.msgpack.Decoder"}
NUMBERS = {"int", "float", "complex"}
FOREIGN = {"read", "read_bytes", "read_text", "readline", "recv", "decode"}
"""Methods that give bytes or text of a file or a connection."""

WORDS = re.compile(
    r"\b(decode|Decoder|JSONDecoder|loads?|convert|eval|exec|literal_eval|b64decode|fromhex|fromisoformat|fromfile|open_memmap"
    r"|Unpickler|(safe_|full_|unsafe_)?load_all|(safe|full|unsafe)_load)\b|import \*"
    r"|\b(int|float|complex)\([^\n]{0,60}\.(read|read_bytes|read_text|readline|recv)\("
)
"""Without one of them a module decodes nothing."""

OWN = "bytes of this process's own memory"
KERNEL = "text of the kernel's, which is no stranger"
PICKLED = "between a worker and the decoding processes that it starts: they run the user's own data set"
TORCH = "torch's restricted unpickler, whose failures are refused by name; it may read states of any size"
BAD_LINES = "each bad line is counted, or refused with its number"
ELSEWHERE: dict[tuple[str, str], str] = {
    ("holdfast.agent.process", "int"): KERNEL,
    ("holdfast.tools.conversion.consolidate", "torch.load"): TORCH,
    ("holdfast.tools.conversion.convert", "torch.load"): TORCH,
    ("holdfast.checkpoint.dcp", "torch.load"): TORCH,
    ("holdfast.cli.events", "datetime.datetime.fromisoformat"): "an argument of a command, refused by name",
    ("holdfast.cli.logs", "datetime.datetime.fromisoformat"): OWN,
    ("holdfast.cli.plan", "msgspec.json.decode"): "a file of the package",
    ("holdfast.coordinator.service.rollups", "Decoder.decode"): OWN,
    ("holdfast.coordinator.service.tally", "Decoder.decode"): OWN,
    ("holdfast.tools.corpora.build_units", "numpy.fromfile"): "its size was compared with its header",
    ("holdfast.data.collate", "pickle.loads"): PICKLED,
    ("holdfast.data.decoding", "pickle.loads"): PICKLED,
    ("holdfast.tools.corpora.inputs", "json.loads"): BAD_LINES,
    ("holdfast.tools.corpora.inputs", "Decoder.decode"): BAD_LINES,
    (
        "holdfast.kubernetes.objects.check",
        "msgspec.convert",
    ): "its object has passed `check`, or is read by `decode`",
    ("holdfast.kubernetes.objects.schema", "ast.literal_eval"): "the source of the package",
    ("holdfast.engines.slurm.parse", "json.loads"): "`slurm.commands` hands it to `decode`",
    ("holdfast.tools.checks.__main__", "msgspec.json.decode"): "from the process that started it",
    (
        "holdfast.observe.printable",
        "Decoder.decode",
    ): "Python's decoder of UTF-8, which replaces what is none",
    ("holdfast.protocol.machine.processes", "int"): KERNEL,
    ("holdfast.tools.simulate.trace", "datetime.datetime.fromisoformat"): BAD_LINES,
    (
        "holdfast.train.level0_hook",
        "json.loads",
    ): "torch's own records, and any failure of it means that nothing is known",
    ("holdfast.train.script", "exec"): "the user's script",
}
"""Module and what it decodes with, to the reason why not by `decode`."""


def aliases_of(nodes: list[ast.AST]) -> dict[str, str]:
    """Names of imports, to what they stand for."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


class Reading:
    """What one module decodes with, and where it hands it over."""

    def __init__(self, tree: ast.Module, decoders: frozenset[str] = frozenset()) -> None:
        """decoders: full names of decoders of other modules."""
        self._parents: dict[ast.AST, ast.AST] = {}
        # Walked once, and without what has no children of interest: there are some hundred thousand nodes.
        nodes: list[ast.AST] = [tree]
        self._nodes, binding, imports = [], [], []
        self._loads: dict[str, list[ast.AST]] = {}
        for node in nodes:
            for field in node._fields:
                value = getattr(node, field)
                for child in value if type(value) is list else (value,):
                    if isinstance(child, ast.AST) and child._fields:
                        self._parents[child] = node
                        nodes.append(child)
            kind = type(node)
            if kind in (ast.Name, ast.Attribute):
                self._nodes.append(node)
                if type(node.ctx) is ast.Load:
                    self._loads.setdefault(last(node), []).append(node)
            elif kind is ast.Call:
                self._nodes.append(node)
            elif kind in (ast.Import, ast.ImportFrom):
                self._nodes.append(node)
                imports.append(node)
            elif kind in (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return):
                binding.append(node)
        self._aliases = aliases_of(imports)
        self.foreign = decoders
        self.decoders = {
            x for node in binding for x in self._bound_to(node, lambda v: self._makes(v, DECODERS))
        }
        self._codecs = {x for node in binding for x in self._bound_to(node, self._is_codec)}

    def _is_codec(self, value: ast.expr) -> bool:
        return self._makes(value, {"holdfast.protocol.wire.frames.Codec"})

    def full(self, node: ast.AST) -> str:
        """The dotted name of an expression with what its first part was imported as; empty: it is none."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self.full(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def _makes(self, value: ast.expr | None, kinds: set[str]) -> bool:
        if not isinstance(value, ast.Call):
            return False
        func = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        return self.full(func) in kinds

    def _bound_to(self, node: ast.AST, wanted) -> Iterator[str]:
        """The last names of what an assignment binds to such a value; also of several in a tuple."""
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Return):  # of a property: by the name of the function
            above = self._parents.get(node)
            if isinstance(above, ast.FunctionDef) and wanted(node.value):
                yield above.name
            return
        else:
            return
        for target, value in pairs:
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            if any(wanted(part) for part in parts):
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from filter(None, map(last, names))

    def found(self) -> Iterator[tuple[int, str]]:
        """Line and name of each decoding that is not handed over."""
        for node in self._nodes:
            name = self._decodes(node)
            if name and not self._handed_over(node, set()):
                yield node.lineno, name

    def _decodes(self, node: ast.AST) -> str:
        if isinstance(node, ast.ImportFrom):
            return next((f for a in node.names if (f := f"{node.module}.{a.name}") in STARS), "")
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            if self.full(node) in DECODING:
                return self.full(node)
            if isinstance(node, ast.Attribute) and node.attr == "decode" and self._is_decoder(node.value):
                return "Decoder.decode"
        if isinstance(node, ast.Call):
            # A parameter, or a field of another object: only bytes are decoded without an argument that is no name
            # of an encoding.
            given = node.args and not isinstance(node.args[0], ast.Constant)
            if given and isinstance(node.func, ast.Attribute) and node.func.attr == "decode":
                known = self.full(node.func) in DECODING | TAKERS or self._is_decoder(node.func.value)
                codec = last(node.func.value) in self._codecs or self._is_own(node)
                return "" if known or codec else "Decoder.decode"
            if self.full(node.func) in NUMBERS and any(map(self._gives, ast.walk(node))):
                return self.full(node.func)
        return ""

    def _is_own(self, call: ast.Call) -> bool:
        """`self.decode`, of a class that has such a method."""
        above: ast.AST | None = call
        while above is not None and not isinstance(above, ast.ClassDef):
            above = self._parents.get(above)
        own = above is not None and any(
            isinstance(n, ast.FunctionDef) and n.name == "decode" for n in above.body
        )
        return own and last(call.func.value) == "self"

    def _gives(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FOREIGN
        )

    def _is_decoder(self, value: ast.expr) -> bool:
        return (
            last(value) in self.decoders or self.full(value) in self.foreign or self._makes(value, DECODERS)
        )

    def _handed_over(self, node: ast.AST, seen: set[str]) -> bool:
        """Whether it stands in the first argument of `decode`, or in something that is used there alone."""
        child = node
        while (parent := self._parents.get(child)) is not None:
            given = isinstance(parent, ast.Call) and parent.args and child is parent.args[0]
            if given and self.full(parent.func) in TAKERS:
                return True
            if (
                isinstance(parent, ast.FunctionDef)
                and child in parent.body
                and self._used_there(parent.name, seen)
            ):
                return True
            if isinstance(parent, ast.Assign) and child is parent.value:
                name = last(parent.targets[0])
                if isinstance(parent.targets[0], ast.Name) and self._used_there(name, seen):
                    return True
            child = parent
        return False

    def _used_there(self, name: str, seen: set[str]) -> bool:
        if name in seen:
            return False
        seen = seen | {name}
        # Where it calls itself tells nothing of how it is used.
        loads = [node for node in self._loads.get(name, []) if not self._within(node, seen)]
        return bool(loads) and all(self._handed_over(node, seen) for node in loads)

    def _within(self, node: ast.AST, functions: set[str]) -> bool:
        above = self._parents.get(node)
        while above is not None and not (isinstance(above, ast.FunctionDef) and above.name in functions):
            above = self._parents.get(above)
        return above is not None


def last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def elsewhere(source: str) -> set[str]:
    return {name for _, name in Reading(ast.parse(source)).found()}


def test_one_place_decodes_what_others_made():
    readings = {
        m.name: Reading(m.tree)
        for m in modules_of(PACKAGE)
        if m.name != PLACE and WORDS.search(m.path.read_text())
    }
    decoders = frozenset(
        f"{module}.{name}" for module, reading in readings.items() for name in reading.decoders
    )
    found: dict[tuple[str, str], list[int]] = {}
    for module, reading in readings.items():
        reading.foreign = decoders
        for line, name in reading.found():
            found.setdefault((module, name), []).append(line)
    unlisted = {place: lines for place, lines in found.items() if place not in ELSEWHERE}
    assert not unlisted, f"hand the reader to {PLACE}.decode, or list here why that cannot be"
    assert not ELSEWHERE.keys() - found.keys(), "listed, and not there any more"


@pytest.mark.parametrize(
    "source",
    [
        "import msgspec\nmsgspec.json.decode(data)",
        "import msgspec as m\nm.msgpack.decode(data, type=int)",
        "from msgspec import json\njson.decode(data)",
        "from msgspec.json import decode as read\nread(data)",
        "import msgspec\nx = msgspec.json.Decoder(int)\nx.decode(data)",
        "from msgspec.json import Decoder as D\nD(int).decode(data)",
        "import msgspec\nclass A:\n def __init__(self):\n  self._x = msgspec.json.Decoder[int](int)\n def f(self):\n  self._x.decode(1)",
        "import msgspec\nx = msgspec.json.Decoder(int)\nread = x.decode\nread(data)",
        "import msgspec\na, b = msgspec.json.Encoder(), msgspec.json.Decoder(int)\nb.decode(data)",
        "def f(decoder, data):\n return decoder.decode(data)",
        "import json\njson.loads(data)",
        "import json as j\nload = j.loads\nload(data)",
        "from json import loads\nloads(data)",
        "from json import *\nloads(data)",
        "def f(path):\n import tomllib\n with path.open() as file:\n  return tomllib.load(file)",
        "import numpy as np\nnp.load(path)",
        "from pickle import loads as unpickled\nmap(unpickled, parts)",
        "from datetime import datetime\ndatetime.fromisoformat(text)",
        "int(path.read_text())",
        "float(sock.recv(9).strip())",
        "from holdfast.protocol.wire.decoding import decode\nimport json\ndecode(len, json.loads(data), 'x')",
        "from holdfast.protocol.wire.decoding import decode\nimport json\ndef f(x):\n return json.loads(x)\ndecode(f, d, 'x')\nf(d)",
        "from elsewhere import decode\nimport json\ndecode(json.loads, data, 'x')",
        "import json\nclass A:\n def add(self, x):\n  self._all.add(json.loads(x))",
        "import json\ndef f(x):\n return g(x)\ndef g(x):\n f(json.loads(x))",
    ],
)
def test_a_decoding_elsewhere_is_found(source):
    assert elsewhere(source)


@pytest.mark.parametrize(
    "source",
    [
        "from holdfast.protocol.wire.decoding import decode\nimport json\ndecode(json.loads, data, 'x')",
        "from holdfast.protocol.wire import decoding\nimport json\ndecoding.decode(json.loads, data, 'x')",
        "from holdfast.protocol.wire.stored import decode_file\nimport msgspec\nx = msgspec.json.Decoder(int)\ndecode_file(x.decode, p)",
        "from holdfast.protocol.wire.decoding import decode\nimport json\ndecode(lambda x: json.loads(x)['a'], data, 'x')",
        "from holdfast.protocol.wire.decoding import decode\nimport json\ndef f(x):\n return json.loads(x)\ndecode(f, data, 'x')",
        "from holdfast.protocol.wire.decoding import decode\nimport msgspec\nr = partial(msgspec.convert, type=int)\ndecode(r, data, 'x')",
        "data.decode()\ndata.decode('latin-1')\ndata.decode(errors='replace')\nint(text)",
        "import json\njson.dumps(1)",
    ],
)
def test_what_is_handed_over_is_none(source):
    assert not elsewhere(source)
