"""Play whole episodes with any player, score them, and film one. Loads no torchrl."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
from gymnasium import Env
from gymnasium.wrappers import RenderCollection
from numpy.typing import NDArray
from torch import Tensor

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.specs import AtariEnvs, EnvSpec, GymnasiumEnvs, draw_into_memory
from rlsync.runs.actors.envs.vectors import AleEnvs, Envs, EnvStep, ListedEnvs
from rlsync.runs.actors.player import Player, Seat
from rlsync.seams import first_line, machine, whole_file

_AT_ONCE = 8  #: how many environments play at once, at most

#: An episode that goes on for longer counts as one that never ends.
GIVE_UP_AFTER_STEPS = 100_000
#: Seconds in which no episode ends, after which the same is said.
GIVE_UP_AFTER_S = 1800.0
_COUNTED_IN_ONE_STEP = 0.25  #: at most this part of the seconds

#: Frames of one film: they stay in memory until it is written. A longer episode is still played to its end.
MAX_FRAMES = 2000

#: largest width of a gif in pixels: choosing its colours takes time for every pixel
GIF_WIDTH = 400

#: suffix -> the modules that write it, and where each comes from.
_PACKAGES = {
    ".gif": {"imageio": "rlsync[video]", "PIL": "rlsync[video]"},
    ".mp4": {"imageio": "rlsync[video]", "imageio_ffmpeg": "imageio-ffmpeg"},
}

#: What the second copy of an Atari game has different: size, colour, and no stack.
_SCREEN = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1}
_ATARI_FPS = 60
_USUAL_FPS = 30


@dataclass(frozen=True, slots=True)
class Episode:
    """A whole episode, or game where lost lives end episodes: its rewards, not clipped, and its steps."""

    total: float
    length: int


@dataclass(frozen=True, slots=True)
class Score:
    """The returns and lengths of some episodes; the deviation is that of these, divided by their number."""

    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float

    @classmethod
    def of(cls, played: Sequence[Episode]) -> Score:
        """A return that is infinite, or not a number, leaves no mean, deviation, least or largest one."""
        returns = [episode.total for episode in played]
        lengths = [episode.length for episode in played]
        length = statistics.fmean(lengths)
        if not math.isfinite(sum(returns)):
            return cls(len(played), math.nan, math.nan, math.nan, math.nan, length)
        mean = statistics.fmean(returns)
        deviation = statistics.pstdev(returns)
        return cls(len(played), mean, deviation, min(returns), max(returns), length)

    @property
    def rank(self) -> float:
        """The mean return less its standard error, which one episode does not have.

        A version that was lucky in few or widely spread episodes does not replace one that is known to be
        good. One without a mean is the last.
        """
        if math.isnan(self.return_mean):
            return -math.inf
        if self.episodes < 2:
            return self.return_mean
        return self.return_mean - self.return_std / math.sqrt(self.episodes - 1)

    def __str__(self) -> str:
        returned = (
            f"return {self.return_mean:.1f} ± {self.return_std:.1f} "
            f"({self.return_min:.1f} to {self.return_max:.1f})"
        )
        if math.isnan(self.return_mean):
            returned = "no mean return: one is infinite or not a number"
        return f"{returned}  length {self.length_mean:.1f}"


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long it may take until an episode ends, and what each step is a sign of life for."""

    steps: int = GIVE_UP_AFTER_STEPS  # of one episode
    seconds: float = GIVE_UP_AFTER_S  # in which no episode ends
    sign_of_life: Callable[[], object] = nothing


PATIENCE: Patience = Patience()


class _Waited:
    """Ends a wait for the end of an episode, by the limits of a :class:`Patience`."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._counted_s = 0.0
        self._looked_at = time.monotonic()

    def step(self, longest: int, *, ended: bool) -> None:
        """Count a step, after which the longest episode has so many; RlsyncError: it was the last one."""
        patience = self._patience
        now = time.monotonic()
        patience.sign_of_life()
        # A process that was stopped meanwhile, or a machine that was suspended, has not played all that time.
        self._counted_s += min(now - self._looked_at, patience.seconds * _COUNTED_IN_ONE_STEP)
        self._looked_at = now
        if ended:
            self._counted_s = 0.0
        if longest >= patience.steps:
            raise _endless(f"{longest:,} steps", f"steps={patience.steps}")
        if self._counted_s >= patience.seconds:
            raise _endless(
                f"{patience.seconds:g} s and {longest:,} steps", f"s={patience.seconds:g}"
            )


def _endless(after: str, limit: str) -> RlsyncError:
    cure = (
        "let the environment end its episodes: env.max_episode_steps=1000, for rlsync eval "
        "--max-episode-steps 1000; if they are that long, raise the limit"
    )
    where = f"recipe.evaluation.give_up_after_{limit}"
    return RlsyncError(f"an episode has not ended after {after}", where, cure)


def at_once(episodes: int) -> int:
    """How many environments can share so many episodes equally; at most eight."""
    count = _AT_ONCE
    while episodes % count:
        count -= 1
    return count


@torch.inference_mode()
def play(
    player: Player,
    envs: Envs,
    episodes: int,
    seed: int,
    device: torch.device = CPU,
    *,
    patience: Patience = PATIENCE,
) -> Iterator[list[Episode]]:
    """Play as worker 0 of 1. Yields after the reset, and after each step the episodes that ended in it.

    ``episodes`` is a multiple of ``envs.num_envs``: each environment plays an equal share, so that short
    episodes are not counted more often. RlsyncError: an episode goes on for longer than ``patience``.
    """
    count = envs.num_envs
    left = torch.full((count,), episodes // count, device="cpu")
    # of the present episode of each environment
    total = torch.zeros(count, dtype=torch.float64, device="cpu")
    length = torch.zeros(count, dtype=torch.int64, device="cpu")
    seat = Seat.taken(player, seed, device)
    state = seat.begin(count)
    observation = envs.reset(seed)
    is_init = torch.ones(count, dtype=torch.bool, device="cpu")
    reward = torch.zeros(count, device="cpu")
    waited = _Waited(patience)
    yield []

    while bool(left.any()):
        acted = seat.act(observation, is_init, reward, state)
        state = acted.state
        envs.send(acted.action)
        answer = envs.recv()
        observation = answer.observation
        reward = answer.reward
        is_init = answer.terminated | answer.truncated
        total += reward
        length += 1

        # An environment that has played its share goes on, and its episodes count no more.
        ended = []
        for env in answer.over.nonzero().flatten().tolist():
            if left[env]:
                left[env] -= 1
                ended.append(Episode(float(total[env]), int(length[env])))
            total[env] = 0.0
            length[env] = 0
        longest = (length * (left > 0)).max()
        waited.step(int(longest), ended=bool(ended))
        yield ended


class _Pictures(RenderCollection[Any, Any]):
    """Keeps each picture until it is asked for.

    Else the first one of the next episode would replace the last one of this; also in memory, for an
    environment may draw all of them into one array.
    """

    def __init__(self, env: Env[Any, Any]) -> None:
        super().__init__(env, reset_clean=False)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        answer = super().step(action)
        self.frame_list[-1] = np.array(self.frame_list[-1])
        return answer


class FilmedGymnasium(ListedEnvs):
    """One gymnasium environment, filmed by its own render mode ``rgb_array``."""

    def __init__(self, spec: GymnasiumEnvs) -> None:
        drawn = replace(spec, options={**spec.options, "render_mode": "rgb_array"})
        super().__init__(partial(drawn.make, _Pictures), 1, spec.id)
        metadata = self.envs[0].metadata
        if "rgb_array" not in metadata["render_modes"]:
            self.close()
            raise ValueError("its render modes do not name rgb_array")
        #: Steps in one second of real time.
        self.fps = float(metadata.get("render_fps") or _USUAL_FPS)
        #: The picture after the last reset or step, [H, W, 3]; after an episode's last step, its end.
        self.frame = np.empty((0, 0, 3), np.uint8)

    def reset(self, seed: int | None = None) -> Tensor:
        observation = super().reset(seed)
        self._look()
        return observation

    def recv(self) -> EnvStep:
        answer = super().recv()
        self._look()
        return answer

    def _look(self) -> None:
        pictures: Any = self.envs[0].render()
        self.frame = np.asarray(pictures[0])


class FilmedAtari(AleEnvs):
    """An Atari game as the network sees it, and once more in full size and colour: both must agree."""

    def __init__(self, spec: AtariEnvs) -> None:
        options = spec.ale_options()
        super().__init__(spec.game, 1, options, spec.life_loss_ends_episode)
        self.fps = _ATARI_FPS / int(options["frameskip"])
        self.frame = np.empty((0, 0, 3), np.uint8)
        self._game = spec.game
        self._shown = AleEnvs(spec.game, 1, {**options, **_SCREEN})

    def reset(self, seed: int | None = None) -> Tensor:
        if seed is None:
            seed = 0  # both copies need the same seed
        self.frame = self._shown.reset_pictures(seed)[0, -1]
        return super().reset(seed)

    def send(self, action: Tensor) -> None:
        super().send(action)
        self._shown.send(action)

    def recv(self) -> EnvStep:
        answer = super().recv()
        picture, reward, terminated, truncated, info = self._shown.ale.recv()
        over = bool(terminated[0] or truncated[0])
        here = (float(answer.reward[0]), bool(answer.over[0]))
        on_film = (float(reward[0]), over)
        if here != on_film:
            problem = f"the game and its film differ: reward and end {here}, on film {on_film}"
            cure = "leave the video out: --no-video"
            raise RlsyncError(problem, f"{self._game}, started twice with one seed", cure)
        if over:
            picture = info["final_obs"]
        self.frame = picture[0, -1]
        return answer

    def close(self) -> None:
        super().close()
        self._shown.close()


Filmed = FilmedGymnasium | FilmedAtari  #: one environment that gives a picture of each step


def filmed(spec: EnvSpec, seed: int, leave_out: str = "--no-video") -> Filmed:
    """Make one environment and draw it, or raise ConfigError, whose cure says to ``leave_out`` the video."""
    draw_into_memory()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one error is enough
            match spec:
                case AtariEnvs():
                    envs: Filmed = FilmedAtari(spec)
                case GymnasiumEnvs():
                    envs = FilmedGymnasium(spec)
                case _:
                    raise ValueError(f"a {type(spec).__name__} has no screen")
            envs.reset(seed)
    except RlsyncError:
        raise
    except Exception as error:  # it is foreign code, which may raise anything
        raise _nothing_to_see(spec, first_line(error), leave_out) from error
    frame = envs.frame
    if frame.ndim == 3 and frame.shape[-1] == 3 and frame.dtype == np.uint8:
        return envs
    envs.close()
    raise _nothing_to_see(spec, f"it renders {frame.dtype} of shape {list(frame.shape)}", leave_out)


def _nothing_to_see(spec: EnvSpec, why: str, leave_out: str) -> ConfigError:
    if isinstance(spec, GymnasiumEnvs):
        name = spec.id
    else:
        name = str(spec)
    cure = "let it take render_mode=rgb_array and install what it needs (pip install 'rlsync[video]'), or "
    cure += f"leave the video out: {leave_out}"
    return ConfigError(f"{name} cannot be filmed: {why}", "its render mode rgb_array", cure)


@dataclass(frozen=True, slots=True)
class Film:
    """A file, the episode it shows, and its frames: one before the first step and one after each."""

    file: Path
    episode: Episode
    frames: int

    def __str__(self) -> str:
        steps = self.frames - 1
        length = self.episode.length
        words = f"{self.file}: one more episode, return {self.episode.total:.1f}, length {length}"
        if steps != length:
            words += f"; the first {steps} steps of it"
        return words


def check_file(file: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before anything is played."""
    check_packages(file)
    whole_file.check_folder(file)


def check_packages(file: Path) -> None:
    """Raise ConfigError for a file of another kind or with a package missing; the folder need not exist."""
    suffix = file.suffix.lower()
    if suffix not in _PACKAGES:
        raise ConfigError(
            f"a video cannot be written as {suffix!r}", str(file), "name a .gif or an .mp4"
        )
    for module, package in _PACKAGES[suffix].items():
        if not machine.has_package(module):
            problem = f"{module} is not installed, which writes {suffix}"
            cure = f"pip install '{package}'"
            if suffix != ".gif":
                cure += ", or name a .gif"
            raise ConfigError(problem, str(file), cure)


def film(
    player: Player,
    envs: Filmed,
    file: Path,
    seed: int,
    device: torch.device = CPU,
    *,
    patience: Patience = PATIENCE,
) -> Film:
    """Play one episode, and write it, whole or not at all, into a file that :func:`check_file` accepts."""
    episodes: list[Episode] = []
    frames = 0
    gif = file.suffix.lower() == ".gif"

    def write(beside: Path) -> None:
        nonlocal frames
        with closing(_writer(beside, envs.fps)) as writer:
            for ended in play(player, envs, 1, seed, device, patience=patience):
                episodes.extend(ended)
                if frames < MAX_FRAMES:
                    frame = envs.frame
                    if gif:
                        frame = _narrowed(frame)
                    writer.append_data(frame)
                    frames += 1

    whole_file.write_whole(file, write)
    return Film(file, episodes[0], frames)


def _writer(file: Path, fps: float) -> Any:
    import imageio.v2 as imageio

    if file.suffix.lower() == ".gif":  # bits: frames wait as palette images, a third of their bytes
        return imageio.get_writer(file, mode="I", duration=1000 / fps, loop=0, bits=8)
    # Else imageio resizes frames to multiples of 16.
    return imageio.get_writer(file, mode="I", fps=fps, macro_block_size=2)


def _narrowed(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    from PIL import Image

    times = -(-frame.shape[1] // GIF_WIDTH)
    if times == 1:
        return frame
    return np.asarray(Image.fromarray(frame).reduce(times))
