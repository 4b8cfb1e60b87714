"""Which versions of a framework an adapter is for."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import UsageError


class Supported(NamedTuple):
    """A range of versions, each by its first two numbers: its ends are versions that the adapter's tests passed with."""

    distribution: str
    oldest: tuple[int, int]
    before: tuple[int, int]
    """The first one that is not supported."""

    def check(self, version: str, who: str) -> None:
        """Raises UsageError for a version that is not supported. who: what does not support it."""
        numbers = tuple(int(part) for part in version.split(".")[:2])
        if not self.oldest <= numbers < self.before:
            low, high = (".".join(map(str, v)) for v in (self.oldest, self.before))
            raise UsageError(
                f"{self.distribution} {version} is installed, but {who} supports versions from {low} to below "
                f"{high}: pip install '{self.distribution}>={low},<{high}'"
            )


ACCELERATE = Supported("accelerate", (1, 2), (1, 16))
DEEPSPEED = Supported("deepspeed", (0, 19), (0, 20))
LIGHTNING = Supported("lightning", (2, 6), (2, 7))
MEGATRON_BRIDGE = Supported("megatron-bridge", (0, 3), (0, 4))
RAY = Supported("ray", (2, 60), (2, 61))
TORCHTITAN = Supported("torchtitan", (0, 3), (0, 4))
PEFT = Supported("peft", (0, 21), (0, 22))
TRANSFORMERS = Supported("transformers", (5, 20), (5, 25))
TRL = Supported("trl", (1, 10), (1, 17))
