"""rlsync: weights from a learner to the workers that act with them, in TorchRL.

You know which weights acted: every frame was made by exactly one published version, and says which.

``import rlsync`` loads none of its modules: a public name is loaded when it is first used. A relay or a
command line that needs only a part of rlsync does not pay for torchrl.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from warnings import warn as _warn

if TYPE_CHECKING:
    from rlsync.core.errors import (
        AdoptionTimeout,
        AmbiguousSource,
        BoardClosed,
        ConfigError,
        DestinationNotFound,
        LayoutMismatch,
        NoBoard,
        NotFinite,
        NothingChanged,
        NothingPublished,
        NothingToSync,
        PathSyntaxError,
        PublishError,
        RlsyncError,
        RlsyncWarning,
        SourceNotFound,
        StalenessExceeded,
        SyncMapError,
        WorkerLost,
    )
    from rlsync.core.plan import Receipt, Source, SyncPlan
    from rlsync.core.trigger import Every, StepsAhead
    from rlsync.sync.send_shards import SendShards
    from rlsync.torchrl_plugin.dreamer.map import dreamer_map
    from rlsync.torchrl_plugin.dreamer.player import DreamerPlayer
    from rlsync.torchrl_plugin.forkserver import Forkserver
    from rlsync.torchrl_plugin.hooks.log_receipts import LogReceipts
    from rlsync.torchrl_plugin.hooks.policy_lag import LogPolicyLag
    from rlsync.torchrl_plugin.hooks.staleness import BoundStaleness
    from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights
    from rlsync.torchrl_plugin.hooks.update_weights import UpdateWeights
    from rlsync.torchrl_plugin.hooks.verify import VerifySync
    from rlsync.torchrl_plugin.hooks.watch_workers import WatchWorkers
    from rlsync.torchrl_plugin.node_board import NodeBoardScheme
    from rlsync.torchrl_plugin.ray_scheme import RayBoardScheme
    from rlsync.torchrl_plugin.resolve import resolve
    from rlsync.torchrl_plugin.scheme import BoardScheme
    from rlsync.torchrl_plugin.stop import Stop
    from rlsync.torchrl_plugin.weight_board import WeightBoard

    LagAbove = StepsAhead  # deprecated, see _RENAMED

__version__ = "0.1.0.dev0"

__all__ = [
    "SyncWeights",
    "UpdateWeights",
    "SendShards",
    "LogPolicyLag",
    "LogReceipts",
    "BoundStaleness",
    "VerifySync",
    "WatchWorkers",
    "Stop",
    "Every",
    "StepsAhead",
    "Source",
    "WeightBoard",
    "BoardScheme",
    "RayBoardScheme",
    "NodeBoardScheme",
    "Forkserver",
    "dreamer_map",
    "DreamerPlayer",
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
    "NotFinite",
    "ConfigError",
    "RlsyncWarning",
    "NoBoard",
    "NothingPublished",
    "NothingChanged",
    "__version__",
]

#: The module that defines each public name. The block above tells type checkers the same;
#: tests/test_public_api.py compares the two.
_HOMES = {
    "SyncWeights": "rlsync.torchrl_plugin.hooks.sync_weights",
    "SendShards": "rlsync.sync.send_shards",
    "UpdateWeights": "rlsync.torchrl_plugin.hooks.update_weights",
    "LogPolicyLag": "rlsync.torchrl_plugin.hooks.policy_lag",
    "LogReceipts": "rlsync.torchrl_plugin.hooks.log_receipts",
    "BoundStaleness": "rlsync.torchrl_plugin.hooks.staleness",
    "VerifySync": "rlsync.torchrl_plugin.hooks.verify",
    "WatchWorkers": "rlsync.torchrl_plugin.hooks.watch_workers",
    "Stop": "rlsync.torchrl_plugin.stop",
    "Every": "rlsync.core.trigger",
    "StepsAhead": "rlsync.core.trigger",
    "Source": "rlsync.core.plan",
    "WeightBoard": "rlsync.torchrl_plugin.weight_board",
    "BoardScheme": "rlsync.torchrl_plugin.scheme",
    "RayBoardScheme": "rlsync.torchrl_plugin.ray_scheme",
    "NodeBoardScheme": "rlsync.torchrl_plugin.node_board",
    "Forkserver": "rlsync.torchrl_plugin.forkserver",
    "dreamer_map": "rlsync.torchrl_plugin.dreamer.map",
    "DreamerPlayer": "rlsync.torchrl_plugin.dreamer.player",
    "resolve": "rlsync.torchrl_plugin.resolve",
    "SyncPlan": "rlsync.core.plan",
    "Receipt": "rlsync.core.plan",
}

#: Old public names, which still work, and the present ones.
_RENAMED = {"LagAbove": "StepsAhead"}

#: All public names that :data:`_HOMES` does not name.
_ERRORS = "rlsync.core.errors"


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name (PEP 562). Python calls this for names that the package does not have yet."""
        if name in _RENAMED:
            _warn(f"rlsync.{name} is now rlsync.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
            return __getattr__(_RENAMED[name])
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(_import_module(_HOMES.get(name, _ERRORS)), name)
        globals()[name] = found  # so that the next use does not come here
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
