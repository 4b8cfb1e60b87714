"""`holdfast logs`."""


def logs() -> None:
    """Not yet."""
