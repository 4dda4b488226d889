"""``rlsync export``: write a run's policy for programs without rlsync."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import trust
from rlsync.runs.evaluation.export import OBSERVATIONS, check_file, export
from rlsync.runs.evaluation.play import at_once
from rlsync.runs.life.kept import config_of, policy_of
from rlsync.runs.life.training import prepare_process
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.parts import making

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
    parser.add_argument(
        "file", type=Path, help="what is written: a .safetensors, a .pt2 or an .onnx"
    )
    weights = "best, last or a version: the run's best evaluation, its checkpoint (default), one of these two"
    parser.add_argument("--which", default="last", help=weights)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    options = parser.parse_args(arguments)
    prepare_process()
    check_file(options.file)
    config = config_of(options.run, options.trust)
    which = options.which
    if which.isdecimal():
        which = int(which)
    policy = policy_of(options.run, which, where=f"--which {which}", trusted=options.trust)
    with making(config.env):
        envs = make_venv(policy.env, at_once(OBSERVATIONS))
    with closing(envs):
        difference = export(policy, envs, options.file)
    if options.json:
        facts = {
            "file": str(options.file),
            "largest_difference": difference,
            "metadata": policy.metadata(),
        }
        print_document(json_of(facts))
    else:
        print(f"{options.file}: {policy.trained}  digest {policy.digest()}")
        print(
            f"compared on {OBSERVATIONS:,} observations: outputs differ by {difference:.2g} at most"
        )
    return 0
