"""Real parts for tests: environments, canaries, policies, collectors, stock trainers, processes.

Everything is a top-level name, so that a spawned worker can import it.
Discrete parts all have 4 observations and 2 one-hot actions, as CartPole-v1 has; continuous ones
1 action in [-1, 1]. Import it as `tests.tools.parts` only: by another name a class would exist twice.
"""

from tests.tools.parts.canary import (
    Canary,
    CanaryPolicy,
    CanaryPostproc,
    CanaryTransform,
    make_small_canary,
)
from tests.tools.parts.collectors import make_collector, make_workers
from tests.tools.parts.envs import (
    CountingEnv,
    make_cartpole,
    make_continuous_env,
    make_counting_env,
    make_env_with_module,
)
from tests.tools.parts.policies import (
    make_continuous_policy,
    make_critic,
    make_mlp,
    make_plain_policy,
    make_policy,
    make_q_policy,
)
from tests.tools.parts.sizes import ACTIONS, FRAMES_PER_BATCH, OBSERVATIONS
from tests.tools.parts.trainers import (
    Sender,
    make_a2c_loss,
    make_a2c_trainer,
    make_dqn_loss,
    make_dqn_trainer,
    make_free_sac_trainer,
    make_ppo_loss,
    make_ppo_trainer,
    make_sac_loss,
    make_sac_trainer,
)
from tests.tools.processes import (
    child_pids,
    descendant_pids,
    is_alive,
    kill,
    open_fds,
    shared_mappings,
    stopped,
    wait_until,
)
from tests.tools.programs import HAS_RUNS

if HAS_RUNS:
    from rlsync.runs.recipes import pure

    # A run that would go on for ever, until a fault ends it, is not worth half a minute of compiling in a test.
    pure.has_compiler = lambda: False

__all__ = [
    "ACTIONS",
    "FRAMES_PER_BATCH",
    "OBSERVATIONS",
    "Canary",
    "CanaryPolicy",
    "CanaryPostproc",
    "CanaryTransform",
    "CountingEnv",
    "Sender",
    "child_pids",
    "descendant_pids",
    "is_alive",
    "kill",
    "make_a2c_loss",
    "make_a2c_trainer",
    "make_cartpole",
    "make_collector",
    "make_continuous_env",
    "make_continuous_policy",
    "make_counting_env",
    "make_critic",
    "make_dqn_loss",
    "make_dqn_trainer",
    "make_env_with_module",
    "make_free_sac_trainer",
    "make_mlp",
    "make_plain_policy",
    "make_policy",
    "make_ppo_loss",
    "make_ppo_trainer",
    "make_q_policy",
    "make_sac_loss",
    "make_sac_trainer",
    "make_small_canary",
    "make_workers",
    "open_fds",
    "shared_mappings",
    "stopped",
    "wait_until",
]
