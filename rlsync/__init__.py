"""rlsync: weights from a learner to the workers that act with them, in TorchRL.

You know which weights acted: every frame was made by exactly one published version, and says which.
"""

from rlsync.core.errors import (
    AdoptionTimeout,
    AmbiguousSource,
    BoardClosed,
    ConfigError,
    DestinationNotFound,
    LayoutMismatch,
    NothingToSync,
    PathSyntaxError,
    PublishError,
    RlsyncError,
    SourceNotFound,
    StalenessExceeded,
    SyncMapError,
    WorkerLost,
)
from rlsync.core.plan import Receipt, Source, SyncPlan
from rlsync.core.trigger import Every, LagAbove
from rlsync.torchrl_plugin.hooks.policy_lag import LogPolicyLag
from rlsync.torchrl_plugin.hooks.staleness import BoundStaleness
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights
from rlsync.torchrl_plugin.hooks.update_weights import UpdateWeights
from rlsync.torchrl_plugin.hooks.verify import VerifySync
from rlsync.torchrl_plugin.hooks.watch_workers import WatchWorkers
from rlsync.torchrl_plugin.resolve import resolve
from rlsync.torchrl_plugin.scheme import BoardScheme, WeightBoard

__version__ = "0.1.0.dev0"

__all__ = [
    "SyncWeights",
    "UpdateWeights",
    "LogPolicyLag",
    "BoundStaleness",
    "VerifySync",
    "WatchWorkers",
    "Every",
    "LagAbove",
    "Source",
    "WeightBoard",
    "BoardScheme",
    "resolve",
    "SyncPlan",
    "Receipt",
    "RlsyncError",
    "SyncMapError",
    "PathSyntaxError",
    "SourceNotFound",
    "DestinationNotFound",
    "LayoutMismatch",
    "AmbiguousSource",
    "NothingToSync",
    "PublishError",
    "WorkerLost",
    "AdoptionTimeout",
    "BoardClosed",
    "StalenessExceeded",
    "ConfigError",
    "__version__",
]
