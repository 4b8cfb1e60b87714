"""Names of types as they are written in files and on the wire."""

import re


def kebab(name: str) -> str:
    """`NodeJoined` becomes `node-joined`. What was written before is found by these names: a class keeps its own."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
