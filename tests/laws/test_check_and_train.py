"""``rlsync check`` finds what ``rlsync train`` finds: each recipe, on environments that do one odd thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsync.runs.evaluation.process import read_evaluations
from rlsync.runs.recipes.run_files import ENDED, EVALUATIONS, statistics_in
from tests.tools.parts.odd_envs import ID, KINDS, LENGTH
from tests.tools.programs import ENDS_WITHIN_S, run_program

OFF_POLICY = (
    "recipe.pace.prefill=64",
    "recipe.pace.ratio=0.1",
    "recipe.total_frames=192",
    "collector.frames_per_batch=32",
)
DREAMER = (
    "recipe.cells=8",
    "recipe.belief=8",
    "recipe.batch_size=4",
    "recipe.sequence_length=4",
    "recipe.horizon=3",
    "recipe.total_frames=128",
    "recipe.buffer_frames=400",
    "recipe.pace.prefill=64",
    "recipe.pace.ratio=0.1",
    "collector.frames_per_batch=32",
)
V3 = (*DREAMER, "recipe.categoricals=2", "recipe.classes=4", "recipe.bins=31")
UNROLLS = ("recipe.total_frames=640", "env.num_envs=2")
#: The overrides of a short run of each recipe, and which actions it chooses from.
RECIPES = {
    # Long enough that a worker whose environment raises in each life has ended too often.
    "ppo": ("choice", ("recipe.num_epochs=1", "recipe.total_frames=1024", "collector.frames_per_batch=64")),
    "ppo of numbers": (
        "numbers",
        ("recipe.num_epochs=1", "recipe.total_frames=1024", "collector.frames_per_batch=64"),
    ),
    "ppo of choices": (
        "choices",
        ("recipe.num_epochs=1", "recipe.total_frames=1024", "collector.frames_per_batch=64"),
    ),
    "dqn": ("choice", OFF_POLICY),
    "sac": ("numbers", OFF_POLICY),
    "td3": ("numbers", OFF_POLICY),
    "crossq": ("numbers", OFF_POLICY),
    "impala": ("choice", UNROLLS),
    "laser": ("choice", (*UNROLLS, "recipe.replay.min_steps=100")),
    "impala of choices": ("choices", UNROLLS),
    "dreamer_v1": ("numbers", DREAMER),
    "dreamer_v3": ("choice", V3),
    "dreamer_v3 of choices": ("choices", V3),
}
#: What steps answer; tests/runs/actors/test_answers.py asks of each form whether it is read or refused.
FORMS = {
    "reward_int",
    "observation_list",
    "observation_float64",
    "observation_too_long",
    "observation_in_a_row",
    "truncated_none",
    "info_none",
}
COMMON = (
    "logger=none",
    "recipe.target_return=null",
    "recipe.compile=off",
    "recipe.evaluation.every_frames=64",
    "recipe.evaluation.episodes=2",
    "recipe.evaluation.give_up_after_steps=500",
)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.each_value
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.thorough if kind in FORMS else ()) for kind in KINDS]
)
def test_a_check_finds_what_a_run_finds_and_no_run_that_ends_well_has_a_wrong_number(
    kind: str, recipe: str, tmp_path: Path
) -> None:
    actions, short = RECIPES[recipe]
    odd = ("env=gymnasium", f"env.id={ID}", f"+env.kwargs.kind={kind}", f"+env.kwargs.actions={actions}")
    words = (f"recipe={recipe.partition(' ')[0]}", *odd, *short, *COMMON)
    checked = run_program("rlsync", "check", "--json", *words, cwd=tmp_path, timeout_s=ENDS_WITHIN_S / 2)
    trained = run_program("rlsync", "train", "run_dir=run", *words, cwd=tmp_path, timeout_s=ENDS_WITHIN_S / 2)
    both = "\n".join(
        f"{done.args[1]}: {done.returncode}\n{done.stdout}{done.stderr}" for done in (checked, trained)
    )
    assert checked.returncode in (0, 2), both
    told = json.loads(checked.stdout)
    assert told["ok"] == (trained.returncode == 0), both
    if trained.returncode:
        return
    run = tmp_path / "run"
    assert json.loads((run / ENDED).read_text())["error"] == "", both
    statistics = statistics_in(run)
    assert statistics is not None
    if kind != "never_ends":
        assert statistics.return_mean == LENGTH, both
        evaluations = read_evaluations(run / EVALUATIONS)
        assert evaluations, both
        assert {(e.return_min, e.return_max, e.length_mean) for e in evaluations} == {
            (LENGTH, LENGTH, LENGTH)
        }
