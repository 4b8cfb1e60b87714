"""An agent whose hello can be said once only: from its second connection on, its link is broken for good."""

import os
import sys

from holdfast.agent import __main__ as program
from holdfast.agent.agent import Agent
from holdfast.protocol import messages as m


class Deaf(Agent):
    said = False

    def _hello(self) -> m.Hello:
        if self.said:
            raise RuntimeError("nothing more to say")
        self.said = True
        return super()._hello()


if __name__ == "__main__":
    program.Agent = Deaf  # type: ignore[misc]
    code = program.main()
    sys.stdout.flush()
    os._exit(code)
