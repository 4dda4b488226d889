"""What ``rlsync doctor`` examines in processes of their own: an environment, and a user's trainer."""

from __future__ import annotations

from typing import Any

from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.evaluation.try_out import one_by_one, overwritten
from rlsync.runs.life import users_trainer
from rlsync.runs.life.apart import Failed, Say, Stage, run_apart
from rlsync.runs.life.users_trainer import NamedTrainer
from rlsync.runs.recipes.settings import Config, EnvConfig
from rlsync.runs.recipes.spaces import first_difference, played
from rlsync.seams import examine, verdicts

#: An examination has four steps: two questions to the workers, a publish and a rollout. Each has a deadline.
_STEPS = 4


def env_findings(config: Config, timeout_s: float) -> list[verdicts.Finding]:
    """Play an environment in two processes, and say whether its seed decides what it answers.

    And whether it writes into an answer later.
    """
    env = config.env
    results: list[Any] = []
    for elsewhere in (1, 2):
        result = run_apart(_play, env, config.seed, elsewhere, timeout_s)
        results.append(result)
    for result in results:
        if isinstance(result, Failed):
            return [verdicts.Finding("fail", env.name, result.why, result.cure)]
    (one, written), (other, _) = results
    return [_decided(env.name, one, other), *(_written(env.name, part) for part in written)]


def _decided(name: str, *plays: list[tuple[str, dict[str, int]]]) -> verdicts.Finding:
    if difference := first_difference(*plays):
        key, moment = difference
        problem = f"the environment is not decided by its seed: the {key} of {moment} differs"
        cure = (
            "draw from self.np_random alone, which reset(seed=...) seeds; and let no clock decide"
        )
        return verdicts.Finding("fail", name, problem, cure)
    same = f"{len(plays[0]):,} answers in two processes are equal bit by bit"
    return verdicts.Finding("ok", name, f"the environment is decided by its seed: {same}")


def _written(name: str, part: str) -> verdicts.Finding:
    problem = f"the environment writes into its {part} after it has answered: recipes copy it, and frames of "
    problem += "TorchRL's GymEnv and GymWrapper would show what came later"
    return verdicts.Finding(
        "warn", name, problem, "return a new array each time, for example array.copy()"
    )


def _play(env: EnvConfig, seed: int, elsewhere: int, timeout_s: float, say: Say) -> None:
    say(Stage(f"playing {env.name}", timeout_s))
    answers = list(played(env, seed, elsewhere))
    spec = env.spec()
    parts = []
    if isinstance(spec, GymnasiumEnvs) and one_by_one(spec):
        parts = overwritten(spec, seed)
    say((answers, parts))


def trainer_findings(target: NamedTrainer, timeout_s: float) -> list[verdicts.Finding]:
    """Build a user's trainer, publish once, look into every worker, and judge what arrived."""
    result = run_apart(_examine, target, timeout_s)
    if isinstance(result, Failed):
        return [verdicts.Finding("fail", "trainer", result.why, result.cure)]
    assert isinstance(result, verdicts.Examination)
    return verdicts.findings_of(result)


def _examine(target: NamedTrainer, timeout_s: float, say: Say) -> None:
    trainer = users_trainer.build(target, timeout_s, say)
    say(Stage("examining it", (_STEPS + 1) * timeout_s))
    say(examine(trainer, timeout_s))
    trainer.shutdown()
