"""``rlsync plot`` on runs that were really made: an actor-learner with CSV files, PPO with TensorBoard."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import sys
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from rlsync.runs.cli import panels
from rlsync.runs.cli.main import main
from rlsync.runs.evaluation.process import Evaluated
from rlsync.runs.life.run_folder import NotRecorded, RunFolder
from rlsync.runs.recipes.run_files import RESOLVED
from tests.runs.cli.test_main import SMALL, finished
from tests.tools.programs import ENDS_WITHIN_S, fresh_python

#: The runs are made before the first test, within its time.
RETURN, LAG, STALENESS, MILLISECONDS, BYTES = (panel.title for panel in panels.PANELS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs ``impala`` and ``ppo``."""
    folder = tmp_path_factory.mktemp("plot")
    finished(
        folder,
        "train",
        "recipe=impala",
        "recipe.total_frames=6000",
        "run_dir=impala",
        timeout_s=ENDS_WITHIN_S,
    )
    evaluate(folder / "impala")
    finished(folder, "train", "logger=tensorboard", *SMALL, "run_dir=ppo")
    return folder


def evaluate(run: Path) -> None:
    """What an evaluator that is given time writes down, of the first weights and of two publishes."""
    with (run / "evaluations.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Evaluated)])
        rows.writeheader()
        rows.writerows(
            asdict(Evaluated(8, 20.0 * version, 3.0, 15.0, 25.0, 20.0, version, 0.2))
            for version in (1, 9, 10)
        )


def by_name(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def receipts_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "receipts.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_is_drawn_with_what_it_wrote_down(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(runs / "impala")]) == 0
    assert f"drawn     {runs / 'impala' / 'plot.png'}" in capsys.readouterr().out
    picture = np.asarray(Image.open(runs / "impala" / "plot.png").convert("L"))
    assert picture.shape[1] == 1200
    assert (picture < 128).mean() > 0.005, "there is something on it"

    figure, notes = panels.draw({"impala": RunFolder(runs / "impala")})
    assert notes == []
    axes = by_name(figure)
    assert list(axes) == [RETURN, LAG, STALENESS, MILLISECONDS, BYTES]
    published = receipts_of(runs / "impala")
    frames, milliseconds = axes[MILLISECONDS].lines[0].get_data()
    assert list(frames) == [r["frames"] for r in published]
    assert list(milliseconds) == pytest.approx([1e3 * r["duration_s"] for r in published])
    assert sum(bar.get_height() for bar in axes[STALENESS].patches) == pytest.approx(100)
    assert len(axes[RETURN].containers) == 1, "evaluations, with their error bars"


@pytest.mark.slow
@pytest.mark.thorough
def test_evaluations_stand_at_the_frames_at_which_their_version_was_published(runs: Path) -> None:
    found = RunFolder(runs / "impala").evaluations()
    frames_of = {r["version"]: r["frames"] for r in receipts_of(runs / "impala")}
    assert list(found.frames) == [0, frames_of[9], frames_of[10]], "version 1 is what workers start with"
    assert list(found.values) == [20, 180, 200]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tensorboard_run_is_read_too_and_what_it_has_not_is_a_note(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "ppo", tmp_path / "run")
    (run / "staleness_versions.csv").unlink()
    figure, notes = panels.draw({"ppo": RunFolder(run)})
    assert notes == [f"{STALENESS}, run ppo: no staleness_versions.csv"]
    assert list(by_name(figure)) == [RETURN, LAG, MILLISECONDS, BYTES]
    frames = by_name(figure)[LAG].lines[0].get_xdata()
    assert list(frames) == [256, 512]


@pytest.mark.slow
@pytest.mark.thorough
def test_without_tensorboard_its_metrics_are_left_out_with_the_cure(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorboard.backend")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    figure, notes = panels.draw({"ppo": RunFolder(runs / "ppo")})
    assert list(by_name(figure)) == [STALENESS, MILLISECONDS, BYTES]
    assert "pip install 'rlsync[tensorboard]'" in notes[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_runs_are_compared_in_one_figure_in_which_nothing_overlaps(runs: Path) -> None:
    folders = {name: RunFolder(runs / name) for name in ("impala", "ppo")}
    figure, notes = panels.draw(folders)
    assert notes == []
    axes = by_name(figure)
    assert len(axes[MILLISECONDS].lines) == 2
    assert len({line.get_color() for line in axes[MILLISECONDS].lines}) == 2
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said[:2] == ["impala: impala on CartPole-v1, seed 0", "ppo: ppo on CartPole-v1, seed 0"]

    figure.draw_without_rendering()
    boxes = [legend.get_window_extent(), *(a.get_tightbbox() for a in figure.axes)]
    boxes += [text.get_window_extent() for text in figure.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    whole = figure.bbox.expanded(1.001, 1.001)
    assert all(whole.contains(x, y) for box in boxes for x, y in box.corners())


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_still_writing_is_drawn_without_its_last_half_line(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "impala", tmp_path / "run")
    whole = len(receipts_of(run))
    with (run / "receipts.jsonl").open("a") as file:
        file.write('{"version": 99, "rea')
    assert len(RunFolder(run).receipts()) == whole


@pytest.mark.slow
@pytest.mark.thorough
def test_frames_that_a_resumed_run_did_again_are_drawn_once(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "impala", tmp_path / "run")
    curve = run / "metrics" / "scalars" / "return.csv"
    curve.write_text("100,1.0\n200,2.0\n300,3.0\n200,2.5\n250,2.6\n")
    found = RunFolder(run).metric("return")
    assert list(zip(found.frames, found.values, strict=True)) == [
        (100, 1),
        (200, 2.0),
        (200, 2.5),
        (250, 2.6),
    ]


def test_many_points_become_medians_in_a_band(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: {name: ppo}\nenv: {id: CartPole-v1}\nseed: 3\n")
    scalars = tmp_path / "metrics" / "scalars"
    scalars.mkdir(parents=True)
    (scalars / "return.csv").write_text("".join(f"{i},{i % 10}\n" for i in range(10_000)))
    figure, _ = panels.draw({"it": RunFolder(tmp_path)})
    (axes,) = figure.axes
    assert len(axes.lines[0].get_xdata()) == panels.GROUPS
    assert len(axes.collections) == 1
    assert any("5th to 95th percentile" in text.get_text() for text in figure.legends[0].get_texts())


def with_returns(folder: Path, seed: int, frames: int, slope: float, lr: float = 0.1) -> RunFolder:
    """A run that got better by so much with each frame."""
    (folder / "metrics" / "scalars").mkdir(parents=True)
    config = f"recipe: {{name: ppo, lr: {lr}}}\nenv: {{id: CartPole-v1}}\nseed: {seed}\nrun_dir: {folder}\n"
    (folder / "config.yaml").write_text(config)
    rows = [f"{at},{slope * at}\n" for at in range(0, frames + 1, frames // 4)]
    (folder / "metrics" / "scalars" / "return.csv").write_text("".join(rows))
    return RunFolder(folder)


def test_runs_that_differ_in_their_seeds_alone_are_drawn_as_one_as_far_as_all_have_come(
    tmp_path: Path,
) -> None:
    slopes = (0.1, 0.2, 0.3, 0.4, 9.0)
    runs = {
        f"s{seed}": with_returns(tmp_path / f"{seed}", seed, 400, slope) for seed, slope in enumerate(slopes)
    }
    runs["s4"] = with_returns(tmp_path / "4a", seed=4, frames=200, slope=9.0)
    runs["lr"] = with_returns(tmp_path / "lr", seed=0, frames=400, slope=1.0, lr=0.2)
    figure, _ = panels.draw(runs)
    (axes,) = figure.axes
    *each, together, other = axes.lines
    assert len(each) == len(slopes)
    frames, middle = together.get_data()
    assert (frames[0], frames[-1], len(axes.collections)) == (0, 200, 1)
    assert middle[-1] == pytest.approx(200 * 0.3), "a quarter is left out at each end, so the outlier is"
    assert list(other.get_xdata()) == [0, 100, 200, 300, 400]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["ppo on CartPole-v1, recipe.lr=0.1, 5 seeds", "lr: ppo on CartPole-v1, seed 0"]


def test_agents_that_share_a_replay_are_no_seeds_of_one_thing(tmp_path: Path) -> None:
    agents = {
        name: with_returns(tmp_path / "agents" / name, seed=int(name), frames=40, slope=1) for name in "01"
    }
    figure, _ = panels.draw(agents)
    assert len(figure.axes[0].lines) == 2
    assert not figure.axes[0].collections


def recorded(folder: Path, lag: int, staleness: dict[int, int]) -> dict[str, Axes]:
    """The panels of a run that has recorded only these."""
    (folder / "config.yaml").write_text("recipe: {name: ppo}\nenv: {id: CartPole-v1}\nseed: 3\n")
    (folder / "metrics" / "scalars" / "sync").mkdir(parents=True)
    (folder / "metrics" / "scalars" / "sync" / "lag_versions.csv").write_text(f"64,{lag}\n128,{lag}\n")
    rows = "".join(f"{age},{steps}\n" for age, steps in staleness.items())
    (folder / "staleness_versions.csv").write_text(f"staleness_versions,steps\n{rows}")
    figure, _ = panels.draw({"it": RunFolder(folder)})
    figure.draw_without_rendering()
    return by_name(figure)


def test_ages_that_are_all_zero_stand_at_a_whole_number(tmp_path: Path) -> None:
    axes = recorded(tmp_path, lag=0, staleness={0: 128})
    ages = [label.get_text() for label in axes[STALENESS].get_xticklabels()]
    assert {"0", "1", "2"} <= set(ages)
    assert all(age.lstrip("−").isdigit() for age in ages)
    ticks = [float(tick) for tick in axes[LAG].get_yticks()]
    assert ticks == [round(tick) for tick in ticks]
    assert axes[STALENESS].patches[0].get_height() == 100


def test_a_thousand_ages_are_grouped_and_no_step_is_lost(tmp_path: Path) -> None:
    axes = recorded(tmp_path, lag=3, staleness=dict.fromkeys(range(1000), 2))
    bars = axes[STALENESS].patches
    assert len(bars) <= panels.GROUPS
    assert sum(bar.get_height() for bar in bars) == pytest.approx(100)
    assert bars[0].get_x() == -0.5
    assert bars[-1].get_x() + bars[-1].get_width() >= 999.5


def test_a_folder_that_is_no_run_is_refused_and_one_that_holds_runs_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(tmp_path / "nothing")]) == 2
    assert "name the folder that rlsync train printed" in capsys.readouterr().err
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.yaml").touch()
    assert main(["plot", str(tmp_path)]) == 2
    assert f"name these: {tmp_path / '0'}" in capsys.readouterr().err


def test_a_run_that_wrote_nothing_yet_a_wrong_format_and_a_run_named_twice_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    assert main(["plot", str(tmp_path)]) == 2
    assert "there is nothing to draw" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "--out", "it.word"]) == 2
    assert "end it in .png" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), str(tmp_path)]) == 2
    assert "named twice" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "receipts.jsonl").write_text('{"version": 1}\n')
    assert main(["plot", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "line 1" in said
    assert str(tmp_path / "receipts.jsonl") in said
    (tmp_path / "staleness_versions.csv").write_text("staleness_versions,steps\nmany,few\n")
    with pytest.raises(ValueError, match="cannot read"):
        RunFolder(tmp_path).staleness()
    (tmp_path / "staleness_versions.csv").write_text("staleness_versions,steps\n")
    with pytest.raises(NotRecorded, match="is empty"):
        RunFolder(tmp_path).staleness()


@pytest.mark.processes
def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / RESOLVED).touch()
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from rlsync.runs.cli.main import main; sys.exit(main(['plot', {str(tmp_path)!r}]))"
    )
    ended = fresh_python("-c", script, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-3:] == [
        "matplotlib is not installed",
        "  where  rlsync plot",
        "  cure   pip install 'rlsync[plot]'",
    ]
