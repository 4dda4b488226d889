"""``rlsync export``: write a run's policy for programs without rlsync."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from rlsync import __version__
from rlsync.cli import trust
from rlsync.cli.eval import checkpoint_of, config_of
from rlsync.cli.main import parser_of, print_document
from rlsync.cli.policy import Which
from rlsync.cli.train import prepare_process
from rlsync.core.errors import ConfigError
from rlsync.core.ledger import Reserved
from rlsync.core.whole_file import json_of, record_in
from rlsync.evaluation.checkpoint import CheckpointPlayer, Trained, load, load_best
from rlsync.evaluation.export import OBSERVATIONS, check_file, export
from rlsync.evaluation.play import at_once
from rlsync.evaluation.policy import Policy
from rlsync.evaluation.process import best_in
from rlsync.recipes.evaluating import acting_of
from rlsync.recipes.parts import making
from rlsync.recipes.run_files import BEST, RECEIPTS, RESOLVED, VERSIONS, best_agent
from rlsync.recipes.settings import Config
from rlsync.workers.devices import CPU, device_named
from rlsync.workers.envs.specs import make_venv

_DESCRIPTION = """Write the policy of a run for programs without rlsync: its weights (.safetensors), or what
computes its likeliest actions, for torch (.pt2) or other programs (.onnx).

The file has the version, the digest of the weights, the spaces and the config as its metadata. It is written
only if it acts as the original does in 1,000 observations of the run's environment."""

_EXAMPLES = """examples:
  rlsync export runs/2026-11-20/18-00-00-000000 policy.pt2
  rlsync export runs/2026-11-20/18-00-00-000000 policy.onnx --which best
  rlsync export runs/2026-11-20/18-00-00-000000 policy.safetensors --which 1200 --json

exit status: 0 the file is written, 1 it would act in another way, 2 not a run with such weights, a player
that this format cannot hold or a wrong command line, 130 after Ctrl-C
"""


def main(arguments: list[str]) -> int:
    parser = parser_of("export", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run", type=Path, help="the run's folder, as rlsync train prints it")
    parser.add_argument("file", type=Path, help="what is written: a .safetensors, a .pt2 or an .onnx")
    weights = "best, last or a version: the run's best evaluation, its checkpoint (default), one of these two"
    parser.add_argument("--which", default="last", help=weights)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    given = parser.parse_args(arguments)
    prepare_process()
    check_file(given.file)
    config = config_of(given.run, given.trust)
    which = int(given.which) if given.which.isdecimal() else given.which
    policy = policy_of(given.run, which, f"--which {which}", given.trust)
    with making(config.env):
        envs = make_venv(policy.env, at_once(OBSERVATIONS))
    with closing(envs):
        apart = export(policy, envs, given.file)
    if given.json:
        told = {"file": str(given.file), "largest_difference": apart, "metadata": policy.metadata()}
        print_document(json_of(told))
    else:
        print(f"{given.file}: {policy.trained}  digest {policy.digest()}")
        print(f"compared on {OBSERVATIONS:,} observations: outputs differ by {apart:.2g} at most")
    return 0


def policy_of(
    run: Path, which: Which, where: str, trusted: bool, greedy: bool = True, device: str | torch.device = CPU
) -> Policy:
    """See :func:`rlsync.load_policy`; ``where`` is what errors call the place of ``which``."""
    at = device_named(device, where)
    run = best_agent(run)
    config = config_of(run, trusted)
    trust.check_file(run / BEST, run, trusted)
    acting = acting_of(config, deterministic=greedy)
    trained = _loaded(run, which, where, config, acting, trusted)
    with making(config.env):
        envs = make_venv(acting.env, 1)
    envs.close()
    numbers = record_in(run / VERSIONS, Reserved, "the reserved version numbers")
    origin = {
        "rlsync": __version__,
        "recipe": config.recipe.name,
        "env": config.env.id,
        "run_id": "" if numbers is None else numbers.run_id,
        "config": (run / RESOLVED).read_text(),
    }
    return Policy(acting, trained, envs.actions, greedy=greedy, origin=origin).to(at)


def _loaded(
    run: Path, which: Which, where: str, config: Config, acting: CheckpointPlayer, trusted: bool
) -> Trained:
    """Give a player the weights that are asked for, which are the best or those of the checkpoint."""
    best = None if which == "last" else best_in(run / BEST, trusted=trusted)
    if which == "best" or (best is not None and best.version == which):
        return load_best(run / BEST, run / RECEIPTS, acting, trusted=trusted)
    if which != "last" and not isinstance(which, int):
        raise ConfigError(f"{which!r} names no weights of a run", where, "give best, last or a version")
    trained = load(checkpoint_of(run, None, config, trusted), acting)
    if which not in ("last", trained.version) or (which != "last" and trained.unpublished_steps):
        held = f"it keeps last: {trained}" + ("" if best is None else f", best: version {best.version}")
        raise ConfigError(f"the run keeps no weights of version {which}", where, held)
    return trained
