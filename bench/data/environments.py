"""The peers' Python environments: loaders that cannot share one get two."""

from __future__ import annotations

from bench.recovery.environments import Environment


def _fill_loaders(environment: Environment) -> None:
    environment.pip("install", "torchdata==0.11.0", "datasets==5.2.0")


def _fill_streaming(environment: Environment) -> None:
    environment.pip("install", "mosaicml-streaming==0.13.0")


LOADERS = Environment("loaders", ("torchdata", "datasets"), _fill_loaders)
STREAMING = Environment("streaming", ("mosaicml-streaming",), _fill_streaming)
PEERS = (LOADERS, STREAMING)
