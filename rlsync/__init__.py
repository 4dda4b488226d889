"""rlsync: weights from a learner to the workers that act with them, in TorchRL.

You know which weights acted: every frame was made by exactly one published version, and says which.

``import rlsync`` loads none of its modules but the errors: a public name is loaded when it is first used. A
relay or a command line that needs only a part of rlsync does not pay for torchrl.
"""
# isort: skip_file

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from rlsync.core import errors as _errors

__version__ = "0.1.0.dev0"

#: The public names, by the module that defines them.
_NAMES = {
    "rlsync.torchrl_plugin.hooks.sync_weights": ["SyncWeights"],
    "rlsync.torchrl_plugin.hooks.update_weights": ["UpdateWeights"],
    "rlsync.sync.sharded.send_shards": ["SendShards"],
    "rlsync.torchrl_plugin.hooks.logs": ["LogPolicyLag", "LogReceipts"],
    "rlsync.torchrl_plugin.hooks.staleness": ["BoundStaleness"],
    "rlsync.torchrl_plugin.hooks.verify": ["VerifySync"],
    "rlsync.torchrl_plugin.hooks.watch_workers": ["WatchWorkers"],
    "rlsync.torchrl_plugin.hooks.record_schedule": ["RecordSchedule", "Rerun"],
    "rlsync.torchrl_plugin.ending.stop": ["Stop"],
    "rlsync.core.trigger": ["Every", "StepsAhead"],
    "rlsync.core.plan": ["Source", "SyncPlan", "Receipt"],
    "rlsync.torchrl_plugin.scheme": ["WeightBoard", "BoardScheme"],
    "rlsync.torchrl_plugin.ray_scheme": ["RayBoardScheme", "NodeBoardScheme"],
    "rlsync.torchrl_plugin.forkserver": ["Forkserver"],
    "rlsync.torchrl_plugin.dreamer.map": ["dreamer_map"],
    "rlsync.torchrl_plugin.dreamer.player": ["DreamerPlayer"],
    "rlsync.torchrl_plugin.collectors.choose": ["resolve"],
    "rlsync.cli.policy": ["load_policy"],
    "rlsync.core.errors": [
        name for name, kind in vars(_errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    ],
}

__all__ = [name for names in _NAMES.values() for name in names] + ["__version__"]

if TYPE_CHECKING:
    # A type checker cannot read the table. `as` tells it that a name is public.
    # tests/project/test_public_api.py compares the two.
    from rlsync.cli.policy import load_policy as load_policy
    from rlsync.core.errors import (
        AdoptionTimeout as AdoptionTimeout,
        AmbiguousSource as AmbiguousSource,
        BoardClosed as BoardClosed,
        ConfigError as ConfigError,
        DestinationNotFound as DestinationNotFound,
        DoesNotAct as DoesNotAct,
        DropoutDiffers as DropoutDiffers,
        IdleLeaves as IdleLeaves,
        LayoutMismatch as LayoutMismatch,
        NoBoard as NoBoard,
        NotFinite as NotFinite,
        NothingChanged as NothingChanged,
        NothingLearns as NothingLearns,
        NothingPublished as NothingPublished,
        NothingToSync as NothingToSync,
        PathSyntaxError as PathSyntaxError,
        PublishError as PublishError,
        RlsyncError as RlsyncError,
        RlsyncWarning as RlsyncWarning,
        SourceNotFound as SourceNotFound,
        StalenessExceeded as StalenessExceeded,
        SyncMapError as SyncMapError,
        WorkerLost as WorkerLost,
    )
    from rlsync.core.plan import Receipt as Receipt, Source as Source, SyncPlan as SyncPlan
    from rlsync.core.trigger import Every as Every, StepsAhead as StepsAhead
    from rlsync.sync.sharded.send_shards import SendShards as SendShards
    from rlsync.torchrl_plugin.collectors.choose import resolve as resolve
    from rlsync.torchrl_plugin.dreamer.map import dreamer_map as dreamer_map
    from rlsync.torchrl_plugin.dreamer.player import DreamerPlayer as DreamerPlayer
    from rlsync.torchrl_plugin.forkserver import Forkserver as Forkserver
    from rlsync.torchrl_plugin.hooks.logs import LogPolicyLag as LogPolicyLag
    from rlsync.torchrl_plugin.hooks.logs import LogReceipts as LogReceipts
    from rlsync.torchrl_plugin.hooks.record_schedule import RecordSchedule as RecordSchedule
    from rlsync.torchrl_plugin.hooks.record_schedule import Rerun as Rerun
    from rlsync.torchrl_plugin.hooks.staleness import BoundStaleness as BoundStaleness
    from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights as SyncWeights
    from rlsync.torchrl_plugin.hooks.update_weights import UpdateWeights as UpdateWeights
    from rlsync.torchrl_plugin.hooks.verify import VerifySync as VerifySync
    from rlsync.torchrl_plugin.hooks.watch_workers import WatchWorkers as WatchWorkers
    from rlsync.torchrl_plugin.ray_scheme import NodeBoardScheme as NodeBoardScheme
    from rlsync.torchrl_plugin.ray_scheme import RayBoardScheme as RayBoardScheme
    from rlsync.torchrl_plugin.scheme import BoardScheme as BoardScheme
    from rlsync.torchrl_plugin.ending.stop import Stop as Stop
    from rlsync.torchrl_plugin.scheme import WeightBoard as WeightBoard
else:  # a type checker that saw __getattr__ would accept every misspelt name

    def __getattr__(name: str) -> object:
        """Load a public name (PEP 562). Python calls this for names that the package does not have yet."""
        for module, names in _NAMES.items():
            if name in names:
                globals()[name] = public = getattr(_import_module(module), name)  # the next use finds it here
                return public
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
