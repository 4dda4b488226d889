"""What a program does first, done once in the fork server of the tests for all programs that it forks.

The first composition of a process takes three times as long as the next: Hydra loads its grammar, and rlsync
makes its settings known.
"""

from __future__ import annotations

from rlsync.runs.config import command_line
from rlsync.runs.life.job import jobs_of

jobs_of(command_line.read(["logger=none"]))
