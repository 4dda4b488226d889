"""How old the weights are that a run's workers act with: what its config says, in words. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THIS_MACHINE = "none"  #: what ``cluster.kind`` says where all workers are on this machine


def lag_in_words(lag: int | None, *, in_process: bool = False) -> str:
    """How old the weights are that workers act with; ``in_process``: the learner's own process acts."""
    if in_process:
        return "lag 0: the learner's own process acts between its updates"
    if lag is None:
        return "no fixed lag: workers act with the newest version"
    if lag == 0:
        return f"lag {lag}: workers wait for each update"
    if lag < 2:
        return f"lag {lag}: workers act while the learner learns"
    return f"lag {lag}: workers act up to {lag} rollouts ahead of the learner"


#: What the kinds of collectors of 0.1 are now.
_KINDS: Mapping[str, Mapping[str, int | None]] = {
    "sync": {"lag": 0},
    "async": {"lag": None},
    "in_process": {"lag": 0, "num_workers": 0},
}


def collector_of_now(collector: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run's collector; what 0.1 said by ``kind`` is said by ``lag`` and ``num_workers``."""
    keys = dict(collector)
    kind = str(keys.get("kind"))
    if kind not in _KINDS:  # there is none, or a value that is refused as an unknown key
        return keys
    del keys["kind"]
    now = dict(_KINDS[kind])
    if kind == "async" and "lag" in keys:  # impala had one before
        del now["lag"]
    return keys | now
