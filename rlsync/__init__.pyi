"""The public names, each from the module that defines it: the one list of them, which Python reads, too.

``as`` tells a type checker that a name is public.
"""
# isort: skip_file

from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights as SyncWeights
from rlsync.torchrl_plugin.hooks.update_weights import UpdateWeights as UpdateWeights
from rlsync.sync.sharded.send_shards import SendShards as SendShards
from rlsync.torchrl_plugin.hooks.logs import (
    LogPolicyLag as LogPolicyLag,
    LogReceipts as LogReceipts,
)
from rlsync.torchrl_plugin.hooks.staleness import BoundStaleness as BoundStaleness
from rlsync.torchrl_plugin.hooks.verify import VerifySync as VerifySync
from rlsync.torchrl_plugin.hooks.watch_workers import WatchWorkers as WatchWorkers
from rlsync.record.record_schedule import RecordSchedule as RecordSchedule
from rlsync.record.record_schedule import Rerun as Rerun
from rlsync.torchrl_plugin.ending.stop import Stop as Stop
from rlsync.core.trigger import Every as Every, StepsAhead as StepsAhead
from rlsync.core.plan import Source as Source, SyncPlan as SyncPlan, Receipt as Receipt
from rlsync.torchrl_plugin.scheme import WeightBoard as WeightBoard, BoardScheme as BoardScheme
from rlsync.torchrl_plugin.ray_scheme import NodeBoardScheme as NodeBoardScheme
from rlsync.torchrl_plugin.ray_scheme import RayBoardScheme as RayBoardScheme
from rlsync.torchrl_plugin.forkserver import Forkserver as Forkserver
from rlsync.torchrl_plugin.dreamer.map import dreamer_map as dreamer_map
from rlsync.torchrl_plugin.dreamer.player import DreamerPlayer as DreamerPlayer
from rlsync.torchrl_plugin.collectors.choose import resolve as resolve
from rlsync.runs.life.policy import load_policy as load_policy
from rlsync.core.errors import (
    AdoptionTimeout as AdoptionTimeout,
    AmbiguousSource as AmbiguousSource,
    BoardClosed as BoardClosed,
    BatchStatistics as BatchStatistics,
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
    OlderWeightsAct as OlderWeightsAct,
    PathSyntaxError as PathSyntaxError,
    PublishError as PublishError,
    RlsyncError as RlsyncError,
    RlsyncWarning as RlsyncWarning,
    SourceNotFound as SourceNotFound,
    StalenessExceeded as StalenessExceeded,
    SyncMapError as SyncMapError,
    WorkerLost as WorkerLost,
)

__version__: str
