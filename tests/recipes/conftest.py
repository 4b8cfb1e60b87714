"""The recipes' modules, which import each other by their plain names."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = {
    "checks": "recipe.checks",
    "config": "recipe.config",
    "errors": "recipe.errors",
    "experts": "recipe.experts",
    "export": "export",
    "lora": "recipe.lora",
    "make_tiny": "make_tiny",
    "model": "recipe.model",
    "routers": "recipe.routers",
    "samples": "recipe.samples",
    "train": "train",
    "weights": "recipe.weights",
}


@pytest.fixture(scope="session")
def recipes():
    pytest.importorskip("transformers", reason="needs pip install 'holdfast-train[recipes]'")
    before = {name: sys.modules.pop(name, None) for name in NAMES.values()}
    sys.path.insert(0, str(RECIPES))
    try:
        yield SimpleNamespace(**{short: import_module(name) for short, name in NAMES.items()})
    finally:
        sys.path.remove(str(RECIPES))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
