"""Where other workers reach this process: for control channels, and for the state that it holds."""

from __future__ import annotations

from holdfast.train.control_channel import ChannelListener
from holdfast.train.peer_transfer import DonorServer


class Endpoint:
    """Where other workers reach this process. It lasts as long as the process, also when `main` is run again."""

    def __init__(self, host: str, token: str, worker: str) -> None:
        self.listener = ChannelListener(host, token, worker)
        self.donor = DonorServer(host, token, worker)

    def close(self) -> None:
        """Nobody reaches this process any more."""
        self.listener.close()
        self.donor.close()
