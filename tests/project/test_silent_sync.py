"""The demonstration of a silent sync shows what it says, in a short form."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from matplotlib.image import imread

EXAMPLE = Path(__file__).parents[2] / "examples" / "silent_sync.py"
BATCHES = 3


@pytest.mark.slow
@pytest.mark.thorough
def test_stock_weights_never_change_while_ours_do_with_every_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "silent.png"
    stock, ours = runpy.run_path(str(EXAMPLE))["main"](BATCHES, str(figure))

    # The same start: the first batch of both was made by the same weights, with the same games.
    assert stock.acting[0] == ours.acting[0] == stock.learner[0]
    assert stock.returns[0] == ours.returns[0]

    assert len(set(stock.learner)) == BATCHES, "the learner trains, and nobody notices"
    assert len(set(stock.acting)) == 1
    assert stock.lag() == [0, 1, 2]
    assert stock.stamped == [0, 1, 2], "TorchRL's stamps advance all the same"

    assert ours.acting == ours.learner
    assert len(set(ours.acting)) == BATCHES
    assert ours.lag() == [0, 0, 0]
    assert ours.stamped == [1, 2, 3]

    lines = capsys.readouterr().out.splitlines()
    assert "acting weights changed 0 times in 3 batches, policy lag 2" in lines[0]
    assert "acting weights changed 2 times in 3 batches, policy lag 0" in lines[1]
    assert imread(figure).std() > 0
