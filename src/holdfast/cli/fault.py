"""`holdfast fault`."""


def fault() -> None:
    """Not yet."""
