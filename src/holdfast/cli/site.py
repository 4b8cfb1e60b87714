"""`holdfast slurm`: scripts for sites that run Slurm."""

from __future__ import annotations

import sys

import typer

app = typer.Typer(
    help="Prints scripts for slurm.conf, to be installed where Slurm finds them.", no_args_is_help=True
)


@app.command("health-program")
def health_program() -> None:
    """Prints a HealthCheckProgram that drains a node whose basic checks fail."""
    _print("health.sh")


@app.command("epilog")
def epilog() -> None:
    """Prints an Epilog that ends what a job left on a node."""
    _print("epilog.sh")


def _print(name: str) -> None:
    from importlib import resources

    sys.stdout.write(resources.files("holdfast.engines.slurm").joinpath("site", name).read_text())
