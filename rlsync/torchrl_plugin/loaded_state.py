"""What becomes of the weights in a state dict that is loaded into a process collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsync.core.plan import POLICY
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat.stamps import STAMP


def publish_loaded(publisher: WorkersPublisher, state_dict: Mapping[str, Any]) -> None:
    """Publish the policy of a state dict that a collector has loaded, unless a hook publishes the learner's.

    What acts was published. So a worker takes its weights from the board again at its next rollout, and
    weights that were only loaded would be lost. Versions go on counting from that of the state dict.

    Args:
        publisher: of the collector's workers.
        state_dict: what was loaded.
    """
    loaded = state_dict.get("worker0", {}).get("policy_state_dict")
    if loaded is None or publisher.publish_default is not None or POLICY not in publisher.destinations:
        return
    publisher.ledger.advance_to(int(state_dict.get(STAMP) or 0))
    publisher.send_over(POLICY, loaded)
