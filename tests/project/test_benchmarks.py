"""The scripts in benchmarks/, run for a few seconds: they count, they fail when they should, they write."""

from __future__ import annotations

import argparse
import ast
import csv
import json
import math
import runpy
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rlsync.runs.config import command_line
from rlsync.runs.life.job import jobs_of
from rlsync.runs.recipes.checks import check
from tests.tools.parts.namespaces import in_a_session
from tests.tools.programs import ENDS_WITHIN_S, fresh_python

pytestmark = pytest.mark.processes

needs_simpy = pytest.mark.skipif(find_spec("simpy") is None, reason="needs the extra rlsync[dev]")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra rlsync[ray]")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: A reader that takes a slot without a lease and without asking which version lies there.
WITHOUT_LEASES = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from rlsync.transport.board import BoardReader
BoardReader._lease_slot = lambda self, version, slot: True  # workers import this file and do it too
from soak import main
if __name__ == "__main__":
    raise SystemExit(main())
"""

#: A server that stamps its answers with the version before.
ONE_BEHIND = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from rlsync.torchrl_plugin.compat import servers
exact = servers.serve_version
servers.serve_version = lambda server, version: exact(server, max(0, version - 1))
from servers import main
if __name__ == "__main__":
    raise SystemExit(main())
"""

#: A run that benchmarks/kills.py starts, and whether it tells the processes apart as their board does.
ROLES = f"""
import os, random, signal, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import kills
from rlsync.runs.life.state import handle_in
from rlsync.transport.board.format import EVALUATOR, BoardWatch

def main():
    kills.own_shared_memory()
    life = kills.Life(Path(sys.argv[1]), (*kills.RECIPES[sys.argv[2]].words, *kills.COMMON))
    try:
        chance = random.Random(0)
        assert kills.until(lambda: life.over or handle_in(life.run) and life.pid_of("evaluator", chance))
        readers = BoardWatch(*handle_in(life.run).open()).status()
        samplers = {{reader.pid for reader in readers if reader.reader != EVALUATOR}}
        assert len(samplers) == kills.WORKERS
        assert {{life.pid_of("sampler", chance) for _ in range(50)}} == samplers
        (evaluator,) = {{life.pid_of("evaluator", chance) for _ in range(50)}}
        os.kill(evaluator, signal.SIGKILL)
        told = f"the evaluator (pid {{evaluator}}) was killed by SIGKILL"
        assert kills.until(lambda: told in life.output()), life.output()
    finally:
        life.destroy()

if __name__ == "__main__":  # a fork server imports this file
    main()
"""


def _run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return fresh_python(str(script), *map(str, arguments), check=False)


@pytest.mark.thorough
def test_a_short_soak_counts_kills_stops_and_layouts_and_finds_nothing_bad(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    ended = _run(BENCHMARKS / "soak.py", "--workers", 3, "--seconds", 2, "--seed", 9, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert not any(found["bad"].values()), found
    assert set(found["bad"]) > {"torn", "wrong", "fell", "lost", "coalesced", "leaked_descriptors"}
    counts = found["counts"]
    assert counts["respawns"] == counts["kills"] > 0
    assert counts["stops"] > 0
    assert counts["layouts"] >= 2  # the first, and the last one that all must reach
    assert counts["publishes"] > 100
    assert 3 <= counts["adoptions"] <= counts["looks"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["impala", "ppo"])
def test_the_signals_of_kills_go_to_the_processes_that_they_are_meant_for(
    recipe: str, tmp_path: Path
) -> None:
    (script := tmp_path / "roles.py").write_text(ROLES)
    ended = _run(script, tmp_path, recipe)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.thorough
def test_a_soak_of_readers_without_leases_finds_what_they_tear_and_fails(tmp_path: Path) -> None:
    script, out = tmp_path / "without_leases.py", tmp_path / "soak.json"
    script.write_text(WITHOUT_LEASES)
    ended = _run(script, "--workers", 2, "--seconds", 1.5, "--out", out)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    bad = json.loads(out.read_text())["bad"]
    assert bad["wrong"] > 0
    assert bad["torn"] > 0


@pytest.mark.thorough
def test_the_footprint_of_a_board_is_one_descriptor_a_worker_however_many_tensors(tmp_path: Path) -> None:
    out, table = tmp_path / "footprint.json", tmp_path / "footprint.md"
    schemes, size = ["board alias", "board copy"], ["--tensors", 10, 200, "--workers", 2, "--big-floats", 0]
    ended = _run(BENCHMARKS / "footprint.py", "--schemes", *schemes, *size, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["tensors"], row["scheme"]) for row in rows] == [(n, s) for n in (10, 200) for s in schemes]
    assert {row["worker_board_descriptors"] for row in rows} == {1}
    assert len({row["worker_descriptors"] for row in rows}) == 1
    assert all(row["grown_bytes"] > 0 for row in rows)
    assert "| 200 | 2 |" in table.read_text()


@pytest.mark.thorough
def test_many_workers_are_measured_and_each_has_the_descriptors_of_one(tmp_path: Path) -> None:
    out = tmp_path / "many.json"
    ended = _run(BENCHMARKS / "many_workers.py", "--workers", 2, 12, "--seconds", 2, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    few, many = json.loads(out.read_text())
    assert (few["workers"], many["workers"]) == (2, 12)
    assert few["worker_descriptors"] == many["worker_descriptors"]
    assert many["learner_descriptors"] - few["learner_descriptors"] == 2 * 10
    assert min(few["learner_us_per_batch"], many["learner_us_per_batch"], many["record_bytes_per_batch"]) > 0


@pytest.mark.thorough
def test_workers_that_adopt_by_alias_keep_no_copy_of_their_own(tmp_path: Path) -> None:
    out, table = tmp_path / "footprint.json", tmp_path / "footprint.md"
    size = ["--tensors", 20, "--floats", 1_000_000, "--workers", 3, "--big-floats", 0]
    script, written = BENCHMARKS / "footprint.py", ["--out", out, "--table", table]
    ended = _run(script, "--schemes", "board alias", "board copy", *size, *written)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    by_alias, by_copy = (row["copies"] for row in json.loads(out.read_text())["rows"])
    assert by_alias < 3.5  # three slots
    assert by_copy > 5.5  # and a copy for each of three workers


@pytest.mark.slow
@pytest.mark.thorough
def test_frames_of_a_board_are_counted_and_none_is_torn_or_misnamed(tmp_path: Path) -> None:
    out = tmp_path / "schemes.csv"
    ended = _run(BENCHMARKS / "schemes.py", "--schemes", "board", "--frames", 512, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = csv.DictReader(out.read_text().splitlines())
    assert int(row["frames"]) >= 512
    assert (row["torn"], row["misnamed"]) == ("0", "0")


@pytest.mark.thorough
def test_a_step_is_timed_without_a_publish_with_one_and_with_one_in_the_background(tmp_path: Path) -> None:
    out = tmp_path / "background.json"
    ended = _run(BENCHMARKS / "background.py", "--models", "small", "--steps", 2, "--busy", "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert row["payload_bytes"] == 4 * 3 * (128 * 128 + 128)
    assert all(row[way]["step_s"] > row[way]["held_s"] > 0 for way in ("at once", "in background"))
    assert "| small, busy |" in ended.stdout


@pytest.mark.thorough
def test_the_steps_of_a_learner_are_timed_for_each_precision_and_beside_torchrl(tmp_path: Path) -> None:
    ended = _run(BENCHMARKS / "impala_loss.py", "--repeats", 1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "TorchRL" in ended.stdout


@pytest.mark.thorough
def test_laser_and_impala_run_to_the_last_step_allowed_and_a_run_that_failed_says_so(tmp_path: Path) -> None:
    out, table = tmp_path / "laser.json", tmp_path / "laser.md"
    size = ["--seeds", 3, 4, "--max-steps", 3200, "--replay-ratio", 2]
    ended = _run(BENCHMARKS / "laser_cartpole.py", *size, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert found["replay"]["ratio"] == 2
    runs = [(run["algorithm"], run["seed"]) for run in found["runs"]]
    assert runs == [("impala", 3), ("impala", 4), ("laser", 3), ("laser", 4)]
    assert {run["updates"] for run in found["runs"]} == {3200 // (8 * 20)}
    assert {run["env_steps"] for run in found["runs"]} == {None}
    differs = {run["algorithm"]: set(run["last"]) for run in found["runs"]}
    assert differs["laser"] > differs["impala"]
    assert table.read_text().count("> 3,200") == 2 * 3  # two seeds and their median


@pytest.mark.thorough
def test_agents_are_run_alone_and_sharing_their_experience(tmp_path: Path) -> None:
    out, table = tmp_path / "shared.json", tmp_path / "shared.md"
    size = ["--lrs", 1e-3, 1e-2, "--seeds", 0, "--max-steps", 2400]
    ended = _run(BENCHMARKS / "shared_experience.py", *size, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(out.read_text())["steps"] == {"alone": [[None, None]], "sharing": [[None, None]]}
    assert [line.split("|")[1].strip() for line in table.read_text().splitlines()[2:]] == ["alone", "sharing"]


@pytest.mark.thorough
def test_the_actor_learner_is_measured_beside_torchrls_parts(tmp_path: Path) -> None:
    out, table = tmp_path / "rates.json", tmp_path / "rates.md"
    contenders = ["--only", "rlsync-fp32", "torchrl", "--seconds", 4, "--envs", 2, "--rollout", 8]
    ended = _run(BENCHMARKS / "actor_learner.py", *contenders, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    for name in ("rlsync-fp32", "torchrl"):
        (figures,) = found["rounds"][name]
        assert figures["steps_per_s"] > 0
        assert figures["cpu_per_s"] > 0.1
        assert figures["lag_mean"] >= 0
        assert name in found["versions"]
        assert f"| {name} |" in table.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("table", "names", "seconds"),
    [("sac", ["rlsync-eager", "torchrl"], 60), ("td3", ["rlsync-eager"], 10)],
)
def test_training_from_a_replay_buffer_is_measured_beside_torchrls_trainer(
    table: str, names: list[str], seconds: int, tmp_path: Path
) -> None:
    # Not compiled: on a busy machine that takes longer than the run.
    contenders = ["--only", *names, "--rounds", 1, "--seconds", seconds, "--prefill", 64]
    ended = _run(BENCHMARKS / "off_policy.py", table, *contenders, "--out", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / f"{table}.json").read_text())
    for name in names:
        (rates,) = found["rounds"][name]
        assert rates["frames_per_s"] > 0
        assert rates["updates_per_s"] > 0
        assert f"| {name} |" in (tmp_path / "tables.md").read_text()
    assert found["rounds"]["rlsync-eager"][0]["updates_per_frame"] == 1  # the pace holds it


@pytest.mark.thorough
def test_whole_runs_are_measured_from_their_first_frame_and_from_the_start_of_their_program(
    tmp_path: Path,
) -> None:
    ended = _run(
        BENCHMARKS / "off_policy.py", "ppo_run", "--only", "rlsync", "--rounds", 1, "--out", tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = json.loads((tmp_path / "ppo_run.json").read_text())["rounds"]["rlsync"]
    assert (run["frames"], run["updates"], run["reached"]) == (20_480, 640, 0)
    assert run["process_s"] > run["seconds"] > 0
    assert run["start_s"] > 0.5, "imports alone take longer"


def test_rlsync_train_takes_all_overrides_of_the_benchmark_beside_its_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    off_policy = import_module("off_policy")
    options = argparse.Namespace(prefill=100, seconds=1.0)
    given = {
        f"{table} {name}": words(options)
        for table, made in off_policy.TABLES.items()
        for name, words in made.contenders.items()
        if name.startswith("rlsync")
    }
    assert len(given) > 20
    for words in given.values():
        assert words[:2] == [*off_policy.RLSYNC_TRAIN]
        overrides = [word.replace(off_policy.SEED, "1") for word in words[2:] if "=" in word]
        (job,) = jobs_of(command_line.read(overrides))
        check(job.config)
        assert job.config.seed == 1


def test_of_a_whole_run_counts_what_passes_beside_evaluations_and_of_equal_runs_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    watch, whole = import_module("peers.watch"), import_module("peers.whole")

    def run(seconds: float) -> Any:
        """A program that starts at 100 s, has its first frame 4 s later, and evaluates for 2 s."""
        end = {"steps": 640, "updates": 20, "seconds": seconds, "evaluating_s": 2.0}
        reports = [
            (100.0, 0.0, {}),
            (104.0, 3.0, {"steps": 0, "updates": 0, "seconds": 0.0}),
            (104.0 + seconds, 3.0 + seconds, end),
            (106.0 + seconds, 4.0 + seconds, {"reached": 1}),
            (107.0 + seconds, 4.0 + seconds, {}),
        ]
        return whole.whole([watch.Sample(at_s, cpu_s, 0.0, said) for at_s, cpu_s, said in reports])

    found = run(10.0)
    assert (found.process_s, found.seconds, found.cpu_s, found.start_s) == (15.0, 8.0, 8.0, 3.0)
    assert (found.frames, found.updates, found.reached) == (640, 20, 1)
    measured = {"rlsync": [run(18.0), run(10.0), run(14.0)], "sb3": [run(22.0), run(18.0)]}
    for pick, seconds, times in ((whole.least, "8.0", "0.50"), (whole.median, "12.0", "0.67")):
        table = whole.whole_table(measured, "sb3", pick).splitlines()
        heads, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (table[0], table[2]))
        shown = dict(zip(heads, row, strict=True))
        assert (shown["seconds"], shown["seconds x sb3"]) == (seconds, times)
        assert (shown["reached"], shown["seconds of each run"]) == ("3 of 3", "16.0 8.0 12.0")


@pytest.mark.thorough
def test_training_a_world_model_is_measured_at_a_held_pace(tmp_path: Path) -> None:
    out, table = tmp_path / "rates.json", tmp_path / "rates.md"
    small = ["--belief", 16, "--width", 16, "--sequence-length", 8, "--batch-size", 4, "--horizon", 3]
    contenders = ["--only", "rlsync-coupled", "--seconds", 6, "--prefill", 64, *small]
    ended = _run(BENCHMARKS / "dreamer.py", *contenders, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (rates,) = json.loads(out.read_text())["rounds"]["rlsync-coupled"]
    assert rates["updates_per_frame"] == pytest.approx(0.5, rel=0.1)
    assert "| rlsync-coupled |" in table.read_text()


@pytest.mark.seconds
@pytest.mark.thorough
def test_the_canary_of_inference_servers_finds_nothing_torn_or_misnamed(tmp_path: Path) -> None:
    out = tmp_path / "servers.json"
    ended = _run(BENCHMARKS / "servers.py", "canary", "--servers", "thread", "--steps", 300, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert (row["torn"], row["misnamed"]) == (0, 0)
    assert row["steps"] >= 300
    assert row["versions_that_acted"] > 10


@pytest.mark.seconds
@pytest.mark.thorough
def test_the_canary_of_inference_servers_finds_stamps_that_are_one_behind(tmp_path: Path) -> None:
    script, out = tmp_path / "one_behind.py", tmp_path / "servers.json"
    script.write_text(ONE_BEHIND)
    ended = _run(script, "canary", "--servers", "thread", "--steps", 50, "--out", out)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert row["misnamed"] > 0


@pytest.mark.seconds
@pytest.mark.thorough
def test_the_cost_of_publishing_to_an_inference_server_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "servers.json"
    short = ["--servers", "thread", "--turns", 2, "--turn-seconds", 0.3]
    ended = _run(BENCHMARKS / "servers.py", "cost", *short, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert row["steps_per_s_quiet"] > 0
    assert row["steps_per_s_publishing"] > 0
    assert row["held_us"] > 0


def _run_alone(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a network of its own, and see that it leaves no process."""
    ran, left = in_a_session(
        [sys.executable, *map(str, command)], alone=True, timeout_s=ENDS_WITHIN_S, grace_s=90
    )
    assert left == set(), ran.stdout + ran.stderr
    return ran


@needs_ray
@pytest.mark.slow
@pytest.mark.thorough
def test_the_canary_of_a_cluster_finds_nothing_torn_misnamed_or_left(tmp_path: Path) -> None:
    out = tmp_path / "canary.json"
    short = ["--steps", 10_000, "--destinations", 2, "--adopt", "alias", "--out", out]
    ended = _run_alone(BENCHMARKS / "ray_cluster.py", "canary", *short)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert row["steps"] >= 10_000
    assert row["nodes"] == 3
    assert row["versions_that_acted"] > 1
    assert set(row["bad"]) >= {"torn", "misnamed", "fell", "missing", "doubled", "objects_left"}
    assert not any(row["bad"].values())


@needs_ray
@pytest.mark.slow
@pytest.mark.thorough
def test_the_actor_learner_is_measured_on_a_ray_node(tmp_path: Path) -> None:
    out, table = tmp_path / "rates.json", tmp_path / "rates.md"
    size = ["--seconds", 4, "--envs", 2, "--rollout", 8, "--workers", 1]
    contenders = ["--cluster", "--only", "rlsync-ray", *size]
    ended = _run_alone(BENCHMARKS / "actor_learner.py", *contenders, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    (figures,) = found["rounds"]["rlsync-ray"]
    assert figures["steps_per_s"] > 0
    assert found["versions"]["rlsync-ray"]["ray"]
    assert "x without Ray" in table.read_text()
    assert "| rlsync-ray |" in table.read_text()


@needs_ray
@pytest.mark.seconds
@pytest.mark.thorough
def test_an_image_crosses_to_each_other_node_of_a_cluster_once(tmp_path: Path) -> None:
    out = tmp_path / "nodes.json"
    short = ["--nodes", 2, "--models", "mlp", "--trials", 3, "--store-mb", 200, "--out", out]
    ended = _run_alone(BENCHMARKS / "ray_publish.py", "nodes", *short)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    row = json.loads(out.read_text())["mlp"]["2"]
    assert row["image_mb"] <= row["came_elsewhere_mb"] < 1.5 * row["image_mb"]
    assert row["adopted_ms"] > 0
    assert row["late_ms"] > 0


@pytest.mark.parametrize(
    ("angle", "turning", "reward"), [(0.0, 0.0, 1), (0.6, 0.0, 0), (0.0, 2.0, 0), (math.pi, 0.0, 0)]
)
def test_a_swinging_pole_is_rewarded_only_while_it_stands(
    angle: float, turning: float, reward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    env = gymnasium.make("swing_up:SparseSwingUp-v0")
    seen, _ = env.reset(seed=0)
    assert seen[2] < -0.99  # the cosine of its angle: it hangs
    env.unwrapped.state[2:] = angle, turning  # type: ignore[attr-defined]
    assert env.step(0)[1] == reward


def test_what_the_page_says_of_sac_and_its_peers_follows_from_its_runs() -> None:
    results = runpy.run_path(str(BENCHMARKS.parent / "docs/results.py"))
    p_value = runpy.run_path(str(BENCHMARKS / "permutation.py"))["p_value"]
    off, cheetah, hopper, sb3s = "off_policy.csv", "HalfCheetah-v5", "Hopper-v5", "stable-baselines3"
    slow = "one update for 8 frames"

    def last(env: str, library: str, options: str, recipe: str = "sac", until: int = 192_500) -> list[float]:
        """The last evaluation until then of each seed: of SB3's runs of 200,000 frames the last but one."""
        return [*map(results["after"](until), results["runs"](off, library, recipe, env, options))]

    first, torchs, one_worker, as_sb3 = (
        last(cheetah, "rlsync", slow + more)
        for more in (
            "",
            "; torch_weights",
            "; torch_weights_one_worker",
            "; torch_weights_one_worker_batch_8",
        )
    )
    long, sb3 = first + torchs + one_worker, last(cheetah, sb3s, slow)
    found = [p_value(long, sb3), p_value(as_sb3, sb3), p_value(as_sb3, one_worker)]
    found += [p_value(last(env, "rlsync", ""), last(env, sb3s, "")) for env in (cheetah, hopper)]
    one_rate, ladder = (
        [*map(results["first"](475.0), results["runs"](off, "rlsync", "dqn", "CartPole-v1", way))]
        for way in ("async_4_workers", "async_4_workers; ladder")
    )
    found.append(p_value(one_rate, ladder))
    assert [round(each, 3) for each in found] == [0.012, 0.738, 0.151, 0.024, 0.857, 0.556]
    for env in (cheetah, hopper):
        crossq, sac = (last(env, "rlsync", "", recipe, until=50_500) for recipe in ("crossq", "sac"))
        assert min(crossq) > max(sac)
        assert p_value(crossq, sac) == pytest.approx(1 / 56)
    assert p_value([1.0, 2.0], [3.0, 4.0]) == pytest.approx(2 / 6)


@needs_ray
@pytest.mark.seconds
@pytest.mark.thorough
def test_what_a_storm_does_is_the_same_for_the_same_seed() -> None:
    storm = [BENCHMARKS / "ray_cluster.py", "storm", "--plan"]
    first, again, other = (_run(*storm, "--seconds", 600, "--seed", seed).stdout for seed in (3, 3, 4))
    assert first == again != other
    struck = [f"how={how!r}, whom={whom!r}" for how in ("kill", "stop") for whom in ("worker", "agent")]
    struck += [f"how={how!r}, whom={whom!r}" for how in ("kill", "stop") for whom in ("mailbox", "raylet")]
    assert all(strike in first for strike in struck)


#: Stands for TorchRL's own tests: one asks for a scheme, one for batches without stamps.
THEIR_TESTS = """
from torchrl.collectors import MultiSyncCollector

from rlsync import BoardScheme
from tests.tools.parts import make_counting_env, make_plain_policy


def batch_of(**options):
    size = {"frames_per_batch": 20, "total_frames": 20}
    collector = MultiSyncCollector([make_counting_env], make_plain_policy(), **size, **options)
    try:
        return next(iter(collector)), collector._weight_sync_schemes["policy"]
    finally:
        collector.shutdown()


def test_a_default():
    assert not isinstance(batch_of()[1], BoardScheme)


def test_a_key():
    assert "policy_version" not in batch_of()[0].keys()


def test_a_choice():
    assert isinstance(batch_of(weight_sync_schemes={"policy": BoardScheme()})[1], BoardScheme)
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_what_fails_with_a_board_only_is_told_from_what_fails_with_stamps(tmp_path: Path) -> None:
    tests = tmp_path / "test" / "test_collectors.py"
    tests.parent.mkdir()
    tests.write_text(THEIR_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = _run(BENCHMARKS / "torchrl_tests.py", tmp_path)
    told = ended.stdout.splitlines()
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "stock 3 passed" in told
    assert "stamped 1 failed 2 passed" in told
    assert "board 2 failed 1 passed" in told
    (default,) = (line for line in told if "test_a_default:" in line)
    assert default.endswith("stock passed stamped passed board failed")
    (key,) = (line for line in told if "test_a_key:" in line)
    assert key.endswith("stock passed stamped failed board failed")


@pytest.mark.seconds
def test_draws_are_timed_and_a_held_pace_is_counted() -> None:
    ended = _run(BENCHMARKS / "replay_limits.py", "--frames", 1000, "--draws", 2)
    assert ended.returncode == 0, ended.stderr
    assert "| at random, ages by the ledger | " in ended.stdout
    assert "\n| Pace | 0 | 0.00 |\n" in ended.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_a_replay_is_measured_as_it_grows_and_a_row_of_pictures_has_an_eighth_of_the_bytes(
    tmp_path: Path,
) -> None:
    out = tmp_path / "replay.json"
    kinds = ["--vectors", 2000, "--pictures", 2000, "--whole", 2000]
    ended = _run(BENCHMARKS / "replay_checkpoints.py", *kinds, "--rows", "--folder", tmp_path, "--json", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    grown = {each["kind"]: each for each in json.loads(out.read_text())["growth"]}
    assert all(each["rows again"] == 2000 for each in grown.values())
    assert grown["pictures"]["checkpoint MB"] < grown["whole pictures"]["checkpoint MB"] / 6


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_is_published_adopted_and_looked_into(tmp_path: Path) -> None:
    out = tmp_path / "large.json"
    ended = _run(BENCHMARKS / "large_models.py", "--models", "1mb", "--trials", 1, "--json", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert (row["payload_mb"], row["proof_left_out"], row["outputs_left_out"]) == (0.9984, 0, 0)
    assert all(
        0 < row[figure] < math.inf for figure in ("publish_ms", "held_ms", "adopt_by_alias_ms", "models")
    )


@pytest.mark.parametrize("script", sorted(BENCHMARKS.rglob("*.py")), ids=lambda script: script.stem)
def test_what_a_benchmark_takes_from_rlsync_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("rlsync", "tests"):
            for name in (alias.name for alias in node.names):
                assert hasattr(import_module(str(node.module)), name) or find_spec(f"{node.module}.{name}")


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The simulator of many nodes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("nodes")


def simulated(simulator: Any, versions: int = 5, **case: Any) -> tuple[Any, dict[str, Any]]:
    """A simulation in which calls and copies take no time, and its row."""
    free = simulator.Limits(ask_s=0.0, report_s=0.0, owner_s=0.0, copy_s=((1.0, 0.0),))
    simulation = simulator.Simulation(simulator.Case(**case), free)
    return simulation, simulation.run(versions=versions, least_s=5.0, most_s=600.0)


@needs_ray
@needs_simpy
def test_what_shares_a_link_arrives_as_if_each_had_its_share_of_it(simulator: Any) -> None:
    import simpy

    env = simpy.Environment()
    link = simulator.Link(env, 100.0)
    ends: dict[str, float] = {}

    def send(name: str, after_s: float, count: float) -> Any:
        yield env.timeout(after_s)
        yield link.send(count)
        ends[name] = env.now

    for name, after_s, count in (("first", 0.0, 100.0), ("short", 0.5, 10.0), ("long", 0.5, 100.0)):
        env.process(send(name, after_s, count))
    env.run()
    # Half of the first is gone when three share 100 a second: the short one takes 0.3 s, and 40 are left then.
    assert ends == pytest.approx({"short": 0.8, "first": 0.8 + 80 / 100, "long": 2.1})
    assert link.sent_bytes == pytest.approx(210.0)


@needs_ray
@needs_simpy
def test_one_node_is_as_late_as_its_link_and_the_latency(simulator: Any) -> None:
    # 12.5 MB over 1 Gbit/s take a tenth of a second.
    _, row = simulated(simulator, nodes=1, gbit=1.0, model_mb=12.5, wanted_per_s=1.0)
    # its answer; two messages until it knows who has the image; then it asks there, and the last byte comes
    assert row["age_s"] == pytest.approx(1.0 + 0.1 + 5 * simulator.LATENCY_S, abs=1e-3)
    assert row["sent_by_learner"] == pytest.approx(1.0, abs=0.01)
    assert row["passed_per_s"] == pytest.approx(1.0, abs=0.2)


@needs_ray
@needs_simpy
@pytest.mark.parametrize("relay", ["waves", "all_at_once"])
def test_all_bytes_that_nodes_get_have_left_a_machine(simulator: Any, relay: str) -> None:
    case = {"nodes": 20, "gbit": 1.0, "model_mb": 1.0, "wanted_per_s": 1.0, "relay": relay}
    simulation, row = simulated(simulator, **case)
    machines = [simulation.learner, *(node.machine for node in simulation.nodes)]
    sent = sum(machine.link.sent_bytes for machine in machines) / simulation.case.image_bytes
    assert sent == pytest.approx(sum(len(node.got) for node in simulation.nodes), abs=1e-3)
    if relay == "all_at_once":  # nobody else has it when all begin
        assert row["sent_by_learner"] == pytest.approx(20.0, abs=0.1)
    else:
        assert 3.0 <= row["sent_by_learner"] < 20.0


@needs_ray
@needs_simpy
def test_waves_keep_a_hundred_nodes_fresh_where_a_link_of_all_does_not(simulator: Any) -> None:
    case = {"nodes": 100, "gbit": 1.0, "model_mb": 6.3, "wanted_per_s": 10.0}
    _, waves = simulated(simulator, relay="waves", **case)
    _, at_once = simulated(simulator, relay="all_at_once", **case)
    assert waves["age_s"] < at_once["age_s"] / 2
    assert waves["sent_by_learner"] < at_once["sent_by_learner"] or at_once["ends"] == "link"


@needs_ray
@needs_simpy
def test_slow_and_dying_nodes_hold_nobody_up(simulator: Any) -> None:
    case = {"nodes": 30, "gbit": 1.0, "model_mb": 6.3, "wanted_per_s": 2.0}
    simulation, row = simulated(simulator, slow_share=0.1, deaths_per_s=0.5, **case)
    assert row["passed_per_s"] > 0.5
    assert len(simulation.nodes) > 30, "nodes have died"


@needs_ray
@needs_simpy
@pytest.mark.seconds
def test_the_simulator_writes_a_row_for_each_case_and_says_what_it_was_told_of_ray(tmp_path: Path) -> None:
    out, table = tmp_path / "nodes.csv", tmp_path / "nodes.md"
    limits = BENCHMARKS.parent / "docs" / "results" / "nodes_limits.json"
    cluster = ["--nodes", 5, "--gbits", 1, 10, "--sizes", 6.3, "--rates", 10]
    written = ["--out", out, "--table", table]
    ended = _run(BENCHMARKS / "nodes.py", "--limits", limits, *cluster, *written)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    relays = [(row["gbit"], row["relay"], float(row["slow_share"]) > 0) for row in rows]
    each = [("waves", False), ("all_at_once", False), ("waves", True)]
    assert relays == [(gbit, *relay) for gbit in ("1.0", "10.0") for relay in each]
    assert all(float(row["age_s"]) >= 0.1 for row in rows)
    assert "| 6.3 MB | 5 | 10 | waves, with faults |" in table.read_text()


@needs_ray
@pytest.mark.slow
@pytest.mark.thorough
def test_what_ray_calls_cost_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    short = ["--receivers", 1, 3, "--trials", 5, "--store-mb", 300]
    ended = _run_alone(BENCHMARKS / "ray_publish.py", "limits", *short, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    limits = json.loads(out.read_text())
    assert set(limits["receivers"]) == {"1", "3"}
    assert all(limits["calls"][call] > 0 for call in ("report_ms", "ask_ms"))
    assert all(time_ms > 0 for image in limits["images_mb"].values() for time_ms in image.values())


@needs_ray
@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_learner_takes_in_is_measured_without_ray_and_from_a_node(tmp_path: Path) -> None:
    out = tmp_path / "intake.json"
    short = ["--nodes", 0, 1, "--observed", "vectors", "--seconds", 1]
    ended = _run_alone(BENCHMARKS / "ray_intake.py", *short, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["nodes"] for row in rows] == [0, 1]
    assert all(row["frames_per_s"] > 0 and row["learner_thread_us_per_frame"] > 0 for row in rows)


@pytest.mark.skipif(find_spec("ale_py") is None or find_spec("ray") is None, reason="needs atari and ray")
@pytest.mark.seconds
@pytest.mark.thorough
def test_rollouts_of_pong_get_smaller_and_come_back_as_they_were(tmp_path: Path) -> None:
    out = tmp_path / "compression.json"
    ended = _run(BENCHMARKS / "ray_intake.py", "compression", "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (zlib, *_) = json.loads(out.read_text())["rows"]
    assert zlib["packer"] == "zlib 1"
    assert zlib["times_smaller"] > 10
