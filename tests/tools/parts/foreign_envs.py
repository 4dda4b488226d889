"""An environment that raises, hangs, prints or ends its process while a worker makes it.

In a process that leads its session, as a learner at a shell does, it is an ordinary CartPole.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

ID = f"{__name__}:Foreign-v0"


class Foreign(CartPoleEnv):
    """``how`` names what it does: one of the methods below."""

    def __init__(self, how: str, **kwargs: Any) -> None:
        if os.getsid(0) != os.getpid():
            getattr(self, how)()
        super().__init__(**kwargs)

    def raises(self) -> None:
        raise RuntimeError("the simulator has no licence\nits second line")

    def hangs(self) -> None:
        sys.stdout.write("looking for a display\n")
        sys.stdout.flush()
        time.sleep(10_000)

    def exits(self) -> None:
        os.write(2, b"assertion failed in sim.cc\n")
        os._exit(7)

    def prints(self) -> None:
        sys.stdout.write("simulator 1.2\n")
        os.write(1, b"from C, on stdout\n")
        os.write(2, b"from C, on stderr\n")


gymnasium.register("Foreign-v0", Foreign, max_episode_steps=100)
