"""`holdfast status`."""


def status() -> None:
    """Not yet."""
