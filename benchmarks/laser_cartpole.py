"""How many environment steps IMPALA and LASER need to reach a CartPole return of 450.

    python benchmarks/laser_cartpole.py [--algorithms impala laser] [--seeds 0 1 2 3 4] [--lag 3]
                                        [--max-steps 400000] [--jobs 1] [--tune] [--lr 3e-3]
                                        [--out laser_cartpole.json] [--table laser_cartpole.md]

A run is one process. Eight environments make unrolls of 20 steps with weights that are ``--lag`` updates old,
then the learner makes one update. Both algorithms have the same network, optimizer, unrolls, discount and
loss coefficients. LASER adds replayed unrolls to each batch, a trust region, and entropy on online data only.
A run ends when the mean return of the newest 20 episodes reaches 450 (:class:`Reached`), or at
``--max-steps``, which counts as a failure. Steps are online steps: replayed steps are not new experience.

``--tune`` runs the grid of learning rates, on seeds that the comparison does not use. The best rate of each
algorithm is in ``BEST_LR``, and a run without ``--lr`` uses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from rlsync.runs.actors.replay.mixing import ReplayMix
from rlsync.runs.actors.replay.unrolls import UnrollReplay
from rlsync.runs.recipes.impala import Categorical, ImpalaLoss, ImpalaNet
from rlsync.runs.recipes.impala.settings import ImpalaConfig, UnrollReplayConfig

ENVS, STEPS = 8, 20
GAMMA, BASELINE, CLIP_NORM = 0.99, 0.5, 1.0
# The discounted return grows to 100. A value network that begins at zero would learn that slowly.
REWARD_SCALE = 0.1
LR_GRID = (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2)
TUNING_SEEDS = (100, 101, 102, 103, 104)
BEST_LR = {"impala": 3e-3, "laser": 5e-3}


LASER = UnrollReplayConfig(
    ratio=4.0, capacity_steps=20_000, min_steps=1_600, threshold=0.1, entropy_on="online"
)


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of one training run."""

    algorithm: str
    seed: int
    lr: float
    lag: int
    max_steps: int
    entropy: float
    replay: UnrollReplayConfig


class Reached:
    """The stopping rule: the mean return of the newest episodes has reached a target. Records the step.

    Args:
        target: the mean return to reach.
        episodes: the number of newest episodes in the mean; there must be that many.
    """

    def __init__(self, target: float = 450.0, episodes: int = 20) -> None:
        self.target = target
        self.newest: deque[float] = deque(maxlen=episodes)
        self.env_steps: int | None = None

    def episode(self, total_reward: float, env_steps: int) -> None:
        """Record that an episode ended after this total of environment steps."""
        self.newest.append(total_reward)
        full = len(self.newest) == self.newest.maxlen
        if self.env_steps is None and full and sum(self.newest) / len(self.newest) >= self.target:
            self.env_steps = env_steps


class Worker:
    """Steps CartPoles, and records unrolls in the batch format of the loss."""

    def __init__(self, seed: int, rule: Reached) -> None:
        self.envs = SyncVectorEnv(
            [partial(gymnasium.make, "CartPole-v1")] * ENVS, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self.rule = rule
        self.env_steps = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.observation, _ = self.envs.reset(seed=seed)
        self.is_init = np.ones(ENVS, dtype=bool)
        self.returns = np.zeros(ENVS)

    @torch.no_grad()
    def unroll(self, net: ImpalaNet, version: int) -> TensorDict:
        """One unroll of each environment."""
        seen, begins = [self.observation], [self.is_init]
        columns: dict[str, list[torch.Tensor | np.ndarray]] = {name: [] for name in _COLUMNS}
        finals, state = [], net.initial_state(ENVS)
        for t in range(STEPS):
            params = net.step(
                torch.from_numpy(seen[-1]), torch.from_numpy(begins[-1]), state
            ).params
            action, log_prob = net.head.act(params, self.generator)
            observation, reward, terminated, truncated, info = self.envs.step(action.numpy())
            ended = terminated | truncated
            finals += [
                (info["final_obs"][b], t, b)
                for b in (truncated & ~terminated).nonzero()[0].tolist()
            ]
            self._count(reward, ended)
            row = (action, reward * REWARD_SCALE, terminated, truncated, log_prob, params)
            for name, value in zip(_COLUMNS, row, strict=True):
                columns[name].append(value)
            seen.append(observation.copy())
            begins.append(ended)
        self.observation, self.is_init = seen[-1], begins[-1]
        batch = {
            name: torch.stack([torch.as_tensor(v) for v in values])
            for name, values in columns.items()
        }
        batch["reward"] = batch["reward"].float()
        batch |= {
            "observation": torch.from_numpy(np.stack(seen)),
            "is_init": torch.from_numpy(np.stack(begins)),
        }
        batch["policy_version"] = torch.full((STEPS, ENVS), version)
        if finals:
            batch["final_observation"] = torch.from_numpy(
                np.stack([final for final, _, _ in finals])
            )
            batch["final_index"] = torch.tensor([[t, b] for _, t, b in finals])
        return TensorDict(batch)

    def _count(self, reward: np.ndarray, ended: np.ndarray) -> None:
        self.env_steps += ENVS
        self.returns += reward
        for b in ended.nonzero()[0].tolist():
            self.rule.episode(float(self.returns[b]), self.env_steps)
            self.returns[b] = 0.0


_COLUMNS = ("action", "reward", "terminated", "truncated", "behaviour_log_prob", "behaviour_params")


class Learner:
    """One network and its updates. Gives its workers the weights of ``lag`` updates ago.

    Args:
        run: the algorithm and its settings.
        replay: a replay to share with other agents; by default its own.
        agent: its number among the agents that share.
    """

    def __init__(self, run: Run, replay: UnrollReplay | None = None, agent: int = 0) -> None:
        torch.manual_seed(run.seed)
        self.net = ImpalaNet((4,), Categorical(2))
        laser = run.algorithm == "laser"
        config = ImpalaConfig(
            gamma=GAMMA,
            entropy_coeff=run.entropy,
            baseline_coeff=BASELINE,
            replay=run.replay if laser else UnrollReplayConfig(),
        )
        self.loss = ImpalaLoss(self.net, **vars(config.loss_settings()))
        self.mix: ReplayMix | None = None
        if laser:
            if replay is None:
                replay = UnrollReplay(run.replay.capacity_steps, seed=run.seed)
            self.mix = ReplayMix(
                replay, run.replay.ratio, agent=agent, min_steps=run.replay.min_steps
            )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=run.lr, eps=1e-5)
        self.acting = deepcopy(self.net)
        self.updates = 0
        self._older: deque[dict] = deque(maxlen=run.lag + 1)
        self._keep()

    def weights(self) -> tuple[ImpalaNet, int]:
        """The weights to act with, and their version."""
        self.acting.load_state_dict(self._older[0])
        return self.acting, self.updates + 1 - len(self._older)

    def update(self, online: TensorDict) -> dict[str, float]:
        """Make one optimizer step."""
        out = self.loss(online if self.mix is None else self.mix(online))
        (out["loss_policy"] + out["loss_baseline"] + out["loss_entropy"]).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        self._keep()
        return {key: float(value.detach()) for key, value in out.items()}

    def _keep(self) -> None:
        self._older.append({name: tensor.clone() for name, tensor in self.net.state_dict().items()})


def train(run: Run) -> dict[str, object]:
    """Make one run. ``env_steps`` is None if the return was not reached."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    rule = Reached()
    worker, learner, logged = Worker(run.seed, rule), Learner(run), {}
    while rule.env_steps is None and worker.env_steps < run.max_steps:
        logged = learner.update(worker.unroll(*learner.weights()))
    return {
        "algorithm": run.algorithm,
        "seed": run.seed,
        "lr": run.lr,
        "env_steps": rule.env_steps,
        "updates": learner.updates,
        "seconds": round(time.perf_counter() - started, 1),
        "last": {key: round(value, 4) for key, value in logged.items()},
    }


def train_all(runs: Sequence[Run], jobs: int) -> list[dict]:
    """Make all runs, and print each result as soon as it is known. Returns them in order."""
    rows = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(train, runs):
            rows.append(row)
            print(
                f"{row['algorithm']:>7} lr {row['lr']:g} seed {row['seed']:>3}: {row['env_steps']} steps, "
                f"{row['updates']} updates, {row['seconds']} s",
                flush=True,
            )
    return rows


def median(rows: Sequence[dict]) -> float:
    """The median of the environment steps. Failed runs count as infinitely long."""
    return statistics.median(row["env_steps"] or float("inf") for row in rows)


def table(rows: Sequence[dict], max_steps: int) -> str:
    """A Markdown table: a row for each algorithm and learning rate, columns for the seeds and the median."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"| algorithm | learning rate | {' | '.join(f'seed {seed}' for seed in seeds)} | median |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for name, lr in dict.fromkeys((row["algorithm"], row["lr"]) for row in rows):
        its = {row["seed"]: row for row in rows if (row["algorithm"], row["lr"]) == (name, lr)}
        cells = [_cell(its[seed]["env_steps"], max_steps) if seed in its else "" for seed in seeds]
        lines.append(
            f"| {name} | {lr:g} | {' | '.join(cells)} | {_cell(median([*its.values()]), max_steps)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(steps: float | None, max_steps: int) -> str:
    return f"> {max_steps:,}" if steps is None or steps == float("inf") else f"{steps:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--algorithms", nargs="+", choices=["impala", "laser"], default=["impala", "laser"]
    )
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--lag", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=400_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tune", action="store_true", help="all learning rates, on other seeds")
    parser.add_argument("--lr", nargs="+", type=float, help="instead of the best of each")
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--replay-ratio", type=float, default=LASER.ratio)
    parser.add_argument("--capacity-steps", type=int, default=LASER.capacity_steps)
    parser.add_argument("--threshold", type=float, default=LASER.threshold)
    parser.add_argument("--reference", default=LASER.reference)
    parser.add_argument("--gate-delta", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    replay = replace(
        LASER,
        ratio=options.replay_ratio,
        capacity_steps=options.capacity_steps,
        threshold=options.threshold,
        reference=options.reference,
        gate_delta=options.gate_delta,
    )
    seeds = options.seeds or (TUNING_SEEDS if options.tune else range(5))
    runs = [
        Run(algorithm, seed, lr, options.lag, options.max_steps, options.entropy, replay)
        for algorithm in options.algorithms
        for lr in options.lr or (LR_GRID if options.tune else [BEST_LR[algorithm]])
        for seed in seeds
    ]
    rows = train_all(runs, options.jobs)
    written = table(rows, options.max_steps)
    print(written)
    if options.out:
        record = {
            "lag": options.lag,
            "max_steps": options.max_steps,
            "replay": asdict(replay),
            "runs": rows,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    if options.table:
        options.table.write_text(written)


if __name__ == "__main__":
    main()
