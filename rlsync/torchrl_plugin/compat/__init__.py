"""All uses of TorchRL's private names: what each is for, and when it can be removed.

All of it was written against torchrl 0.14.1 (2026-11). No module of rlsync outside this room reads or writes
an attribute of TorchRL whose name begins with an underscore; tests/test_torchrl_privates.py looks for them.
The one exception is TorchRL's interface for weight-sync schemes, which has such names: BoardScheme overrides
_init_on_sender_impl, _init_on_receiver_impl, _setup_connection_and_weights_on_sender_impl and
_setup_connection_and_weights_on_receiver_impl.
"""

from __future__ import annotations

from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights
from torchrl.weight_update import WeightSyncScheme

from rlsync.torchrl_plugin.compat.actors import (
    ActorWorkers,
    actor_workers,
    actors_are_stamped,
    calls_a_policy_service,
    needs_no_connection,
    policy_of_actors,
    sends_to_one_actor,
)
from rlsync.torchrl_plugin.compat.bridges import bridge_for_trainer
from rlsync.torchrl_plugin.compat.checkpoints import (
    free_name,
    let_it_be_absent,
    registered_modules,
    replace_component,
)
from rlsync.torchrl_plugin.compat.collectors import (
    acts_ahead,
    after_load_state_dict,
    around_policy_calls,
    around_rollouts,
    before_state_dict,
    collects_in_the_background,
    drop_first_weights,
    has_own_policy_template,
    runs_compiled,
    runs_free,
    says_a_worker_died,
    wrap_write_lock,
)
from rlsync.torchrl_plugin.compat.devices import takes_policies_on
from rlsync.torchrl_plugin.compat.distributed import (
    FIRST_RANK,
    DistributedCollector,
    DistributedSyncCollector,
    DistributedWorkers,
    RayCollector,
    RPCCollector,
    applies_between_rollouts,
    around_batches,
    distributed_workers,
    number_next_update,
    own_policy,
    send_policy_by_value,
    sends_to_some_workers,
    single_collectors,
    stamp_nodes,
    updates_by_itself,
    waits_for_learner,
)
from rlsync.torchrl_plugin.compat.evaluators import (
    acts_in_a_worker,
    around_evaluations,
    evaluated_policy,
    evaluates_here,
    has_evaluated,
    schemes_of_evaluator,
)
from rlsync.torchrl_plugin.compat.policies import send_whole_if_no_module, weights_of
from rlsync.torchrl_plugin.compat.schemes import (
    around_partial_updates,
    around_updates,
    forget_sender,
    schemes_of,
    set_context,
)
from rlsync.torchrl_plugin.compat.servers import (
    InferenceServer,
    ProcessInferenceServer,
    RayInferenceServer,
    around_iterations,
    around_results,
    destination_of_server,
    give_own_policy,
    is_in_a_process,
    is_stamped_by,
    policy_like_served,
    process_of,
    records_a_graph,
    refuse_updates,
    scheme_of_server,
    send_by,
    serve_version,
    server_of,
    stamp_both_ends,
)
from rlsync.torchrl_plugin.compat.stamps import STAMP, announce_version, is_stamped, stamp, turn_on_stamps
from rlsync.torchrl_plugin.compat.trainers import (
    StockHook,
    all_or_nothing,
    optimizer_steps,
    optimizers,
    refuse_remote_learner,
    remove_stock_update_weights,
    stock_update_weights,
)
from rlsync.torchrl_plugin.compat.worker_process import make_room_for_the_stamp

__all__ = [
    "ActorWorkers",
    "AsyncBatchedCollector",
    "Collector",
    "DistributedCollector",
    "DistributedSyncCollector",
    "DistributedWorkers",
    "FIRST_RANK",
    "InferenceServer",
    "MultiCollector",
    "ProcessInferenceServer",
    "RPCCollector",
    "RayCollector",
    "RayInferenceServer",
    "STAMP",
    "StockHook",
    "StockUpdateWeights",
    "Trainer",
    "WeightSyncScheme",
    "actor_workers",
    "actors_are_stamped",
    "acts_ahead",
    "acts_in_a_worker",
    "after_load_state_dict",
    "all_or_nothing",
    "announce_version",
    "applies_between_rollouts",
    "around_batches",
    "around_evaluations",
    "around_iterations",
    "around_partial_updates",
    "around_policy_calls",
    "around_results",
    "around_rollouts",
    "around_updates",
    "before_state_dict",
    "bridge_for_trainer",
    "calls_a_policy_service",
    "collects_in_the_background",
    "destination_of_server",
    "distributed_workers",
    "drop_first_weights",
    "evaluated_policy",
    "evaluates_here",
    "forget_sender",
    "free_name",
    "give_own_policy",
    "has_evaluated",
    "has_own_policy_template",
    "is_in_a_process",
    "is_stamped",
    "is_stamped_by",
    "let_it_be_absent",
    "make_room_for_the_stamp",
    "needs_no_connection",
    "number_next_update",
    "optimizer_steps",
    "optimizers",
    "own_policy",
    "policy_like_served",
    "policy_of_actors",
    "process_of",
    "records_a_graph",
    "refuse_remote_learner",
    "refuse_updates",
    "registered_modules",
    "remove_stock_update_weights",
    "replace_component",
    "runs_compiled",
    "runs_free",
    "says_a_worker_died",
    "scheme_of_server",
    "schemes_of",
    "schemes_of_evaluator",
    "send_by",
    "send_policy_by_value",
    "send_whole_if_no_module",
    "sends_to_one_actor",
    "sends_to_some_workers",
    "serve_version",
    "server_of",
    "set_context",
    "single_collectors",
    "stamp",
    "stamp_both_ends",
    "stamp_nodes",
    "stock_update_weights",
    "takes_policies_on",
    "turn_on_stamps",
    "updates_by_itself",
    "waits_for_learner",
    "weights_of",
    "wrap_write_lock",
]
