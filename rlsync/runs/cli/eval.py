"""``rlsync eval``: play episodes with the weights of a run's checkpoint, and show one of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rlsync import ConfigError
from rlsync.runs.actors.devices import device_named
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import trust
from rlsync.runs.evaluation.checkpoint import CheckpointPlayer, load, load_best
from rlsync.runs.evaluation.play import (
    Film,
    Filmed,
    Patience,
    Score,
    at_once,
    check_file,
    film,
    filmed,
    play,
)
from rlsync.runs.life.kept import checkpoint_of, config_of
from rlsync.runs.life.training import prepare_process
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.env_settings import EnvConfig, ending_after
from rlsync.runs.recipes.evaluating import acting_of, patience_of
from rlsync.runs.recipes.parts import making
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import BEST, RECEIPTS, best_agent, video_file

_DESCRIPTION = """Play episodes with the policy of a checkpoint, in the environment it was trained in.

Actions are drawn from the policy as they were in training; --deterministic takes the likeliest. A Q network
acts greedily, without exploration, either way. Beside the run a gif of one more episode is written, of the
same seed, where the environment can be rendered."""

_EXAMPLES = """examples:
  rlsync eval runs/2026-11-20/18-00-00-000000
  rlsync eval runs/2026-11-20/18-00-00-000000 --episodes 100 --seed 1 --no-video --json
  rlsync eval runs/2026-11-20/18-00-00-000000 --deterministic --video pong.gif
  rlsync eval runs/2026-11-20/18-00-00-000000 --checkpoint kept/best
  rlsync eval runs/2026-11-20/18-00-00-000000 --best
  rlsync eval runs/2026-11-20/18-00-00-000000 --device cpu

exit status: 0 all episodes were played, 1 playing failed, 2 not a run with a checkpoint or a wrong command
line, 130 after Ctrl-C
"""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    run = best_agent(options.run)
    prepare_process()
    config = config_of(run, options.trust)
    if options.device is None:
        device = Run(config).evaluation_device
    else:
        device = device_named(options.device, "--device")
    checkpoint = None
    if not options.best:
        checkpoint = checkpoint_of(run, options.checkpoint, config, options.trust)
    if options.max_episode_steps is not None:
        config = replace(config, env=ending_after(config.env, options.max_episode_steps))
    patience = patience_of(config.recipe.evaluations())
    acting = acting_of(config, deterministic=options.deterministic)
    if checkpoint is None:
        trust.check_file(run / BEST, run, options.trust)
        trained = load_best(run / BEST, run / RECEIPTS, acting, trusted=options.trust)
    else:
        trained = load(checkpoint, acting)
    file = options.video or run / video_file(trained.frames)
    stage, why_none = _stage(acting, file, options)

    score = _score(acting, config.env, options, device, patience)
    if not options.json:
        print(f"{trained}  episodes {score.episodes}  {score}", flush=True)
    shown = None
    if stage is not None:
        shown = film(acting.player, stage, file, options.seed, device, patience=patience)
        stage.close()

    if options.json:
        facts = {
            "run": str(run),
            "recipe": config.recipe.name,
            "env": config.env.name,
            **asdict(trained),
            "seed": options.seed,
            "deterministic": options.deterministic,
            "device": str(device),
            **asdict(score),
            "video": _video(shown, why_none),
        }
        print_document(json_of(facts))
    elif shown is not None:
        print(f"video {shown}")
    elif not options.no_video:
        print(f"no video: {why_none}")
    return 0


def _video(shown: Film | None, why_none: str) -> dict[str, Any]:
    if shown is None:
        return {"file": None, "why": why_none}
    episode = shown.episode
    return {"file": str(shown.file), "return": episode.total, "length": episode.length}


def _score(
    acting: CheckpointPlayer,
    env: EnvConfig,
    options: argparse.Namespace,
    device: torch.device,
    patience: Patience,
) -> Score:
    """Play the episodes that are asked for."""
    with making(env):
        envs = make_venv(acting.env, at_once(options.episodes))
    with closing(envs):
        steps = play(acting.player, envs, options.episodes, options.seed, device, patience=patience)
        return Score.of(list(chain.from_iterable(steps)))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("eval", _DESCRIPTION, _EXAMPLES)
    run = "the run's folder, as rlsync train prints it; of a population its best agent plays"
    parser.add_argument("run", type=Path, help=run)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--best", action="store_true", help="the version that had the run's best evaluation"
    )
    other = "another checkpoint, or another run's (default: the run's)"
    which.add_argument("--checkpoint", type=Path, metavar="PATH", help=other)
    episodes = "how many (default: 20)"
    seed = "of environments and actions (default: 0)"
    parser.add_argument("--episodes", type=_at_least(1), default=20, metavar="N", help=episodes)
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help=seed)
    truncated = "truncate episodes after so many steps (of gymnasium's environments)"
    parser.add_argument("--max-episode-steps", type=_at_least(1), metavar="N", help=truncated)
    device = "where the policy acts (default: evaluation.device of the run's config)"
    parser.add_argument("--device", metavar="NAME", help=device)
    parser.add_argument("--deterministic", action="store_true", help="take the likeliest actions")
    video = parser.add_mutually_exclusive_group()
    file = ".gif or .mp4 (default: eval-FRAMES.gif in the run's folder)"
    video.add_argument("--video", type=Path, metavar="FILE", help=file)
    video.add_argument("--no-video", action="store_true", help="write none")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    return parser


def _at_least(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {low} or more")
        return int(text)

    return number


def _stage(
    acting: CheckpointPlayer, file: Path, options: argparse.Namespace
) -> tuple[Filmed | None, str]:
    """Where the film is made; or nowhere, and why, unless the user insists on one."""
    if options.no_video:
        return None, "not asked for"
    try:
        check_file(file)
        return filmed(acting.env, options.seed), ""
    except ConfigError as error:
        if options.video is not None:
            raise
        return None, f"{error.what}; {error.cure}"
