"""One environment that is played and filmed: a colour frame for every step."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import RenderCollection
from numpy.typing import NDArray
from torch import Tensor

from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.workers.envs.base import Envs, EnvStep
from rlsync.workers.envs.specs import AtariEnvs, EnvSpec, GymnasiumEnvs, make_venv
from rlsync.workers.envs.vectors import AleEnvs, VectorEnvs

Frame = NDArray[np.uint8]

#: What the second copy of an Atari game has different: size, colour, and no stack.
_SCREEN = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1}
_ATARI_FPS = 60
_USUAL_FPS = 30


class FilmedEnvs(Envs):
    """One environment that gives a picture of each step.

    Args:
        played: the environment that is played.
        fps: its steps in one second of real time.
    """

    def __init__(self, played: Envs, fps: float) -> None:
        super().__init__(1, played.actions, played.observation_shape, played.observation_dtype)
        self.played = played
        self.fps = fps

    @property
    @abstractmethod
    def frame(self) -> Frame:
        """The picture after the last reset or step, [H, W, 3]; after an episode's last step, its end."""


class FilmedGymnasium(FilmedEnvs):
    """A gymnasium environment, filmed by its own render mode ``rgb_array``.

    Args:
        spec: the environment.
    """

    def __init__(self, spec: GymnasiumEnvs) -> None:
        keep = partial(
            RenderCollection, reset_clean=False
        )  # keep the last picture of an episode although the next one begins
        options = {**spec.options, "render_mode": "rgb_array", "wrappers": [keep]}
        played = make_venv(replace(spec, options=options), 1)
        assert isinstance(played, VectorEnvs)
        self._envs = played.envs
        self._frame: Any = None
        super().__init__(played, float(self._envs.metadata.get("render_fps") or _USUAL_FPS))

    @property
    def frame(self) -> Frame:
        return np.asarray(self._frame)

    def reset(self, seed: int | None = None) -> Tensor:
        observation = self.played.reset(seed)
        self._look()
        return observation

    def send(self, action: Tensor) -> None:
        self.played.send(action)

    def recv(self) -> EnvStep:
        answer = self.played.recv()
        self._look()
        return answer

    def close(self) -> None:
        self.played.close()

    def _look(self) -> None:
        frames: Any = self._envs.render()
        self._frame = frames[0][0]


class FilmedAtari(FilmedEnvs):
    """An Atari game, and the same game once more for its screen.

    ale-py's vector environment shows what the network sees: small, grey and stacked. So there is a second
    copy with the same options, but full size and in colour. It begins with the same seed and takes the same
    actions; the rewards and ends of both are compared at every step.

    Args:
        spec: the game.
    """

    def __init__(self, spec: AtariEnvs) -> None:
        played = make_venv(spec, 1)
        shown = make_venv(replace(spec, options={**spec.options, **_SCREEN}), 1)
        assert isinstance(shown, AleEnvs)
        super().__init__(played, _ATARI_FPS / int(spec.ale_options()["frameskip"]))
        self._game = spec.game
        self._shown = shown
        self._stack: Any = None

    @property
    def frame(self) -> Frame:
        return np.asarray(self._stack[-1])

    def reset(self, seed: int | None = None) -> Tensor:
        seed = 0 if seed is None else seed  # both copies need the same seed
        self._stack = self._shown.reset(seed)[0].numpy()
        return self.played.reset(seed)

    def send(self, action: Tensor) -> None:
        self.played.send(action)
        self._shown.send(action)

    def recv(self) -> EnvStep:
        answer = self.played.recv()
        seen, reward, terminated, truncated, info = self._shown.ale.recv()
        over = bool(terminated[0] or truncated[0])
        here, on_film = (float(answer.reward[0]), bool(answer.over[0])), (float(reward[0]), over)
        if here != on_film:
            raise RlsyncError(
                f"the game and its film differ: reward and end {here}, on film {on_film}",
                f"{self._game}, started twice with one seed",
                "leave the video out: --no-video",
            )
        self._stack = (info["final_obs"] if over else seen)[0]
        return answer

    def close(self) -> None:
        self.played.close()
        self._shown.close()


def filmed(spec: EnvSpec, seed: int) -> FilmedEnvs:
    """Make one environment that can be filmed. It is reset and rendered once, to be sure that it can.

    Args:
        spec: the environment.
        seed: for that reset.

    Raises:
        ConfigError: it cannot be rendered.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one error is enough
            envs = _filmed(spec)
            envs.reset(seed)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise _nothing_to_see(spec, first_line(error)) from error
    frame = envs.frame
    if frame.ndim == 3 and frame.shape[-1] == 3 and frame.dtype == np.uint8:
        return envs
    envs.close()
    raise _nothing_to_see(spec, f"it renders {frame.dtype} of shape {list(frame.shape)}")


def _filmed(spec: EnvSpec) -> FilmedEnvs:
    match spec:
        case AtariEnvs():
            return FilmedAtari(spec)
        case GymnasiumEnvs():
            return FilmedGymnasium(spec)
    raise ValueError(f"a {type(spec).__name__} has no screen")


def _nothing_to_see(spec: EnvSpec, why: str) -> ConfigError:
    name = spec.id if isinstance(spec, GymnasiumEnvs) else str(spec)
    return ConfigError(
        f"{name} cannot be filmed: {why}",
        "its render mode rgb_array",
        "install what it renders with (pip install 'rlsync[video]'), or leave the video out: --no-video",
    )
