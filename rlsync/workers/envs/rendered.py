"""Gymnasium environments that are observed as their own pictures."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import AddRenderObservation, TransformObservation
from torch.nn import functional as F

from rlsync.core.errors import ConfigError, first_line
from rlsync.workers.envs.specs import GymnasiumEnvs


def draw_into_memory() -> None:
    """Let pygame draw without a display, unless the user has named one of its drivers."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


@dataclass(frozen=True, slots=True)
class RenderedEnvs(GymnasiumEnvs):
    """Any gymnasium id that renders ``rgb_array``: an observation is its picture, made smaller.

    The picture is that of :class:`gymnasium.wrappers.AddRenderObservation`, as uint8
    ``[3, img_height, img_width]``: channels first, as torch's convolutions take it. What the environment
    itself would give as its observation is dropped. ``make`` raises a ConfigError if the environment cannot
    be drawn, or has nothing where the crop is.

    Example:
        >>> RenderedEnvs("CartPole-v1", frameskip=2).img_height
        64
    """

    img_height: int = 64
    img_width: int = 64
    # the part that is seen: (top, bottom, left, right) in pixels of the rendering; empty: all
    crop: tuple[int, ...] = ()
    frameskip: int = 1  # steps for each action; their rewards are added up, and the last one is drawn

    def vector(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        return SyncVectorEnv([self.make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    def make(self) -> gymnasium.Env[Any, Any]:
        draw_into_memory()
        options = dict(self.options)
        wrappers = options.pop("wrappers", ())
        env = self._drawn(options)
        if self.frameskip > 1:
            env = Repeat(env, self.frameskip)
        try:
            env = self._small(AddRenderObservation(env, render_only=True))
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise ConfigError(
                f"{self.id!r} cannot be drawn: {first_line(error)}",
                "env.id",
                "pip install 'rlsync[video]', which has pygame, or what the first line names",
            ) from error
        for wrap in wrappers:
            env = wrap(env)
        return env

    def _drawn(self, options: dict[str, Any]) -> gymnasium.Env[Any, Any]:
        options["render_mode"] = "rgb_array"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*render_mode")  # told below, as an error
                env = gymnasium.make(self.id, **options)
        except TypeError as error:
            if "'render_mode'" not in str(error):
                raise
            raise self._no_picture("it takes no render_mode") from error
        modes = env.metadata.get("render_modes") or []
        if "rgb_array" not in modes:
            env.close()
            raise self._no_picture(f"its render modes are {', '.join(modes) or 'none'}")
        return env

    def _small(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        drawn = env.observation_space.shape
        if drawn is None or len(drawn) != 3 or drawn[-1] != 3:
            raise self._no_picture(f"it renders arrays of shape {drawn}")
        top, bottom, left, right = self.crop or (0, drawn[0], 0, drawn[1])
        if not (0 <= top < bottom <= drawn[0] and 0 <= left < right <= drawn[1]):
            raise ConfigError(
                f"the crop {list(self.crop)} is no part of a picture of {drawn[0]} rows, {drawn[1]} columns",
                "env.crop",
                "give [top,bottom,left,right] within the picture, or [] for all of it",
            )
        size = (self.img_height, self.img_width)
        return TransformObservation(
            env,
            lambda picture: shrunk(picture[top:bottom, left:right], size),
            Box(0, 255, (3, *size), np.uint8),
        )

    def _no_picture(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.id!r} has no picture: {why}, not rgb_array",
            "env.id",
            "give an environment that renders, like CartPole-v1, or observe it as it is: env=gymnasium",
        )


class Repeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action several times, until the episode ends, and adds the rewards up."""

    def __init__(self, env: gymnasium.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = super().step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def shrunk(picture: np.ndarray[Any, Any], size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """A picture ``[height, width, channels]``, uint8, as ``[channels, *size]``. A pixel is the weighted mean
    of those that it covers, so that movements of less than a pixel still show.

    Example:
        >>> shrunk(np.full((40, 60, 3), 7, np.uint8), (2, 2)).tolist()[0]
        [[7, 7], [7, 7]]
    """
    whole = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).unsqueeze(0)
    # gymnasium's ResizeObservation needs opencv; torch is there in any case, and as fast.
    small = F.interpolate(whole, size, mode="bilinear", antialias=True)
    return small.squeeze(0).contiguous().numpy()
