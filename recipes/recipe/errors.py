"""What a recipe refuses."""

from holdfast.errors import UsageError


class Refused(UsageError, ValueError):
    """Bad input, which the message names. Holdfast ends a job whose workers raise it before the first step: another
    attempt would change nothing."""
