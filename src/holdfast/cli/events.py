"""`holdfast events`."""


def events() -> None:
    """Not yet."""
