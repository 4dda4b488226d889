"""The examples run, in a short form, and show what they say they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_trainer_of_ones_own_says_which_version_acted_in_every_batch():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_trainer.py"), "5"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    # Version 1 is what the workers start with; 2 comes before the first frame, then one every 2 batches.
    expected = "[(2, 2), (2, 2), (3, 3), (3, 3), (4, 4)]"
    assert done.stdout.splitlines()[-1] == f"versions that acted, batch by batch: {expected}"
