"""docs/metrics.md names what each recipe logs: no more, no less."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.run_files import METRICS, SCALARS
from rlsync.runs.recipes.settings import Config, NormalizeConfig, OnPolicyNormalizeConfig
from tests.runs.recipes.test_dreamer_recipes import small as small_dreamer
from tests.runs.recipes.test_impala_recipe import LASER
from tests.runs.recipes.test_impala_recipe import small as small_impala
from tests.runs.recipes.test_off_policy import small
from tests.runs.recipes.test_recipes import small_ppo, trained

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
#: With all options on: some are logged with an option alone.
NORMALIZED = NormalizeConfig(observations=True, rewards=True)


def normalized_ppo() -> Config:
    config = small_ppo()
    return replace(config, recipe=replace(config.recipe, normalize=OnPolicyNormalizeConfig(True, True)))


CONFIGS: dict[str, Callable[[], Config]] = {
    "ppo": normalized_ppo,
    "dqn": lambda: small("dqn", normalize=NORMALIZED, prioritized=True, ladder_alpha=7.0),
    "sac": lambda: small("sac", normalize=NORMALIZED, prioritized=True),
    "td3": lambda: small("td3", normalize=NORMALIZED, prioritized=True),
    "crossq": lambda: small("crossq", normalize=NORMALIZED),
    "dreamer_v1": lambda: small_dreamer("dreamer_v1"),
    "dreamer_v3": lambda: small_dreamer("dreamer_v3"),
    "impala": small_impala,
    "laser": lambda: small_impala(replay=LASER),
}
#: An episode of Pendulum does not end in a run of a test.
FROM_THE_FIRST_EPISODE_ON = {"return", "episodes"}
#: These runs are too short for an evaluation.
OF_EVALUATIONS = {"eval/return", "eval/version"}
#: And for a comparison of what acts with what was published.
OF_CHECKS = {f"verify_sync/{n}" for n in ("answered", "whole", "outputs_held", "outputs_without_power")}
#: Only where agents share a replay.
OF_POPULATIONS = {"replay/from_agent_N"}


def documented(recipe: str) -> set[str]:
    """The metrics that the page says a recipe logs."""
    logged: set[str] = set()
    concerned = False
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            concerned = line == "## All recipes" or f"`{recipe}`" in line
        elif line.startswith("- ") and concerned:
            names, _, but = line.partition(":")[0].partition(" (not ")
            if f"`{recipe}`" not in but:
                logged |= set(re.findall(r"`([^`]+)`", names))
    return logged


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", CONFIGS)
@pytest.mark.usefixtures("fork_workers")
def test_what_a_recipe_logs_is_what_the_page_says(recipe: str, tmp_path: Path) -> None:
    config = replace(CONFIGS[recipe](), run_dir=str(tmp_path))
    assert config.logger.kind == "csv"
    trained(recipe_of(config).build(config, None))
    curves = tmp_path / METRICS / SCALARS
    logged = {str(file.relative_to(curves).with_suffix("")) for file in curves.rglob("*.csv")}
    later = OF_EVALUATIONS | OF_CHECKS | OF_POPULATIONS
    assert (logged | FROM_THE_FIRST_EPISODE_ON) - later == documented(recipe) - later
