"""Whether frames change after they were made: TorchRL keeps an environment's arrays, and copies them late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from textwrap import shorten

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import EnvBase

from rlsync.core.errors import ConfigError

_HELD = 8  #: steps whose answers are compared with what they were
_WATCHED = 2 * _HELD  #: steps after which an environment is trusted
_WIDTH = 90


class FramesWatch:
    """Refuses an environment that writes into what it has answered, in its first rollouts.

    A frame is copied at the end of a rollout, or when it is added to a replay buffer: until then it shares
    the memory of what GymWrapper was given. It would show a later observation than the policy has seen, as
    its next, too.
    """

    def __init__(self) -> None:
        # key, what was answered, and its copy
        self._answers: list[tuple[NestedKey, Tensor, Tensor]] = []
        self._steps = 0

    @contextmanager
    def rollout(self, collector: Collector) -> Iterator[None]:
        """Watch one rollout.

        Raises:
            ConfigError: after it, if an answer to one of its first steps is no longer what it was.
        """
        env = collector.env
        if self._steps >= _WATCHED or not isinstance(env, EnvBase):
            yield
            return
        step_and_maybe_reset = env.step_and_maybe_reset
        others = vars(env).get("step_and_maybe_reset")  # somebody else's wrapper, if there is one

        def step(tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
            stepped, root = step_and_maybe_reset(tensordict)
            if self._steps < _HELD:
                self._hold(env, stepped.get("next"))
                self._hold(env, root)
            self._steps += 1
            return stepped, root

        # The answer to the first reset stands in the carrier already.
        if not self._steps:
            self._hold(env, collector._carrier)
        env.step_and_maybe_reset = step
        try:
            yield
        finally:
            del env.step_and_maybe_reset
            if others is not None:
                env.step_and_maybe_reset = others
        self._compare(env)

    def _hold(self, env: EnvBase, answer: TensorDictBase) -> None:
        for key in (*env.observation_spec.keys(True, True), *env.reward_keys):
            with suppress(RuntimeError):  # of different shapes in several environments
                value = answer.get(key, None)
                if isinstance(value, Tensor):
                    self._answers.append((key, value, value.clone()))

    def _compare(self, env: EnvBase) -> None:
        for key, answer, copy in self._answers:
            same = (answer == copy) | ((answer != answer) & (copy != copy))
            if not same.all():
                problem = (
                    f"the environment has written into {key!r} after it had answered it: "
                    "the frames are wrong"
                )
                cure = "return a new array from reset() and from step(), for example array.copy()"
                raise ConfigError(
                    problem, f"the first rollouts in {shorten(str(env), _WIDTH)}", cure
                )
        if self._steps >= _WATCHED:
            self._answers.clear()
