"""``rlsync.load_policy``, for programs. It imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from rlsync.runs.evaluation.policy import Policy

#: Which weights of a run: its best evaluation, its checkpoint, or the version of this number.
Which = Literal["best", "last"] | int


def load_policy(
    run: str | Path,
    which: Which = "last",
    *,
    greedy: bool = True,
    device: str | torch.device = "cpu",
    trust: bool = False,
) -> Policy:
    """The policy that a run trained, as a module that acts.

    Args:
        run: the run's folder; of a population, the best agent's weights are taken.
        which: ``"last"``, its checkpoint, ``"best"``, its best evaluation, or the version of one of these; no
            version names a checkpoint with optimizer steps after its newest publish.
        greedy: take the likeliest action in place of drawing one.
        device: where it acts.
        trust: load also what could run code from the folder of a run that you did not start.

    Raises:
        ConfigError: the folder is no run's, has no such version, is damaged or is not trusted, or its
            environment cannot be made here.

    Example:
        >>> policy = load_policy("runs/pendulum", "best")  # doctest: +SKIP
        >>> policy.version, policy(observation)  # doctest: +SKIP
    """
    from rlsync.runs.life.kept import policy_of

    return policy_of(
        Path(run).absolute(),
        which,
        where=f"load_policy({str(run)!r}, {which!r})",
        trusted=trust,
        greedy=greedy,
        device=device,
    )
