"""Examine a user's trainer in a process of its own, so that it cannot hang or outlive the doctor."""

from __future__ import annotations

from rlsync.cli.apart import Failed, Say, Stage, run_apart
from rlsync.cli.doctor.arrivals import findings_of
from rlsync.cli.doctor.finding import Finding
from rlsync.cli.users_trainer import NamedTrainer, build
from rlsync.torchrl_plugin.examine.examine import Examination, examine

#: An examination has four steps: two questions to the workers, a publish and a rollout. Each has a deadline.
_STEPS = 4


def trainer_findings(target: NamedTrainer, timeout_s: float) -> list[Finding]:
    """Build a user's trainer, examine it, and end all its processes.

    Args:
        target: which trainer.
        timeout_s: how many seconds building may take, and each step of the examination.

    Raises:
        ConfigError: the file cannot be run, or makes no such trainer.
        RlsyncError: rlsync refused something while the trainer was built.
    """
    said = run_apart(_examine, target, timeout_s)
    if isinstance(said, Failed):
        return [Finding("fail", "trainer", said.why, said.cure)]
    assert isinstance(said, Examination)
    return findings_of(said)


def _examine(target: NamedTrainer, timeout_s: float, say: Say) -> None:
    trainer = build(target, timeout_s, say)
    say(Stage("examining it", (_STEPS + 1) * timeout_s))
    say(examine(trainer, timeout_s))
    trainer.shutdown()
