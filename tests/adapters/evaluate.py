"""A script that imports an adapter and trains nothing."""

import os

from holdfast.adapters import world

world.enter()  # what the import of an adapter does
assert "WORLD_SIZE" not in os.environ
