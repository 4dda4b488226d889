"""Frames of one worker in a second of processor time, beside Stable-Baselines3 and gymnasium's bare step.

    python benchmarks/worker_frames.py [--before CHECKOUT] [--peer-venv FOLDER] [--rounds 5]

Each contender is a process with one torch thread that waits for its turn; they take turns, cell by cell, in
each round, and a cell is the best of the rounds. A worker is the real one without its process: a board, a
ring, a player of two layers of 64 tanh units, and the loop that adopts, fills a slot and gives it to the
learner. What the learner does in between (publish, take the slot) is not counted.

    worker T        unrolls of T steps with a new version for each, as ``recipe=impala`` acts
    q worker T      the same with the player of Q-networks
    bare step       gymnasium's SyncVectorEnv, stepped with one action again and again
    SB3             ``collect_rollouts`` of PPO with MlpPolicy, two layers of 64, DummyVecEnv, 64 steps

``--before`` names a checkout of rlsync to compare with. With ``--vector`` the table is another one: the
environments alone, stepped as workers step them, beside gymnasium's CartPoleVectorEnv, which resets a step
later.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ENV = "CartPole-v1"
ENVS = (1, 8, 32)
UNROLLS = (4, 64, 256)
VECTORS = (8, 32, 128)
FRAMES = 1024  #: of one turn, about
SB3_STEPS = 64

Turn = Callable[[], tuple[int, float]]  #: plays; returns frames, and seconds of processor time


def worker_turn(kind: str, envs: int, steps: int) -> Turn:
    """Unrolls of a worker's own loop."""
    import torch
    from torch import nn

    import rlsync.runs.actors.worker as workers
    from rlsync.runs.actors.envs.actions import DiscreteActions
    from rlsync.runs.actors.envs.specs import GymnasiumEnvs, make_venv
    from rlsync.runs.actors.frames import RolloutShape
    from rlsync.runs.actors.player import Player, Seat, without_memory
    from rlsync.runs.actors.players.q import EpsilonGreedyPlayer
    from rlsync.runs.actors.ring.reader import RolloutRing
    from rlsync.runs.actors.ring.writer import RingWriter
    from rlsync.runs.recipes.impala import Categorical, ImpalaNet
    from rlsync.sync.publisher import Publisher
    from rlsync.transport.board.writer import BoardWriter

    torch.manual_seed(0)
    learned: Player = ImpalaNet((4,), Categorical(2)).player()
    if kind == "q":
        layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
        learned = EpsilonGreedyPlayer(nn.Sequential(*layers), DiscreteActions(2), (4,))
    board = BoardWriter()
    publisher = Publisher(board)
    publisher.publish_modules(learned.modules, "the player")
    shape = RolloutShape(steps, envs)
    ring = RolloutRing(shape.layout(learned), 2, 1)
    ring.run()
    player, cpu = without_memory(learned), torch.device("cpu")
    adopter = workers.adopting(board.handle, 0, player, "alias", cpu)
    writer = RingWriter(ring.handle, 0)
    seat = Seat.taken(player, 0, cpu, 0, 1)
    roller = workers.Roller(seat, lambda n: make_venv(GymnasiumEnvs(ENV), n), shape, overlap=False)
    roller.reset(0)

    def turn() -> tuple[int, float]:
        frames, took = 0, 0.0
        while frames < FRAMES:
            publisher.publish_modules(learned.modules, "the player")
            began = time.process_time()
            views = writer.take()
            assert views is not None
            assert writer.slot is not None
            with adopter.acting() as version:
                roller.roll(writer.slot, views, version, lambda: writer.closing)
            writer.commit()
            took += time.process_time() - began
            frames += steps * envs
            taken = ring.take(10.0)
            assert taken is not None
            ring.give_back(taken)
        return frames, took

    return turn


def sb3_turn(envs: int) -> Turn:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    net = {"net_arch": [64, 64]}
    model = PPO(
        "MlpPolicy", make_vec_env(ENV, envs), n_steps=SB3_STEPS, policy_kwargs=net, device="cpu"
    )
    _, callback = model._setup_learn(10**9)

    def turn() -> tuple[int, float]:
        frames, began = 0, time.process_time()
        while frames < FRAMES:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, SB3_STEPS)
            frames += SB3_STEPS * envs
        return frames, time.process_time() - began

    return turn


def step_turn(kind: str, envs: int) -> Turn:
    """Environments without a player: gymnasium's alone, or as workers step them."""
    import gymnasium
    import numpy as np
    import torch

    from rlsync.runs.actors.envs.specs import GymnasiumEnvs, make_venv

    if kind == "ours":
        stepped = make_venv(GymnasiumEnvs(ENV), envs, seed=0)
        sent = torch.zeros(envs, dtype=torch.int64, device="cpu")
    else:
        mode = "sync" if kind == "bare" else "vector_entry_point"
        vector = gymnasium.make_vec(ENV, envs, mode)
        vector.reset(seed=0)
        action = np.zeros(envs, np.int64)

    def turn() -> tuple[int, float]:
        frames, began = 0, time.process_time()
        while frames < FRAMES:
            if kind == "ours":
                stepped.send(sent)
                stepped.recv()
            else:
                vector.step(action)
            frames += envs
        return frames, time.process_time() - began

    return turn


def serve() -> None:
    """Play a turn for each line of standard input, ``[kind, envs, steps]``, and answer frames and seconds."""
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    turns: dict[tuple[str, int, int], Turn] = {}
    for line in sys.stdin:
        kind, envs, steps = json.loads(line)
        if (kind, envs, steps) not in turns:
            match kind:
                case "sb3":
                    turn = sb3_turn(envs)
                case "impala" | "q":
                    turn = worker_turn(kind, envs, steps)
                case _:
                    turn = step_turn(kind, envs)
            turns[kind, envs, steps] = turn
            turn()
        print(json.dumps(turns[kind, envs, steps]()), file=answers, flush=True)


@contextmanager
def contender(python: str, tree: Path | None) -> Iterator[Callable[[str, int, int], float]]:
    """A process that plays turns; it returns the frames of a second of its processor time."""
    path = {} if tree is None else {"PYTHONPATH": str(tree)}
    with subprocess.Popen(
        [python, __file__, "--serve"],
        env={**os.environ, **path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def play(kind: str, envs: int, steps: int) -> float:
            print(json.dumps([kind, envs, steps]), file=asks, flush=True)
            frames, took_s = json.loads(answers.readline())
            return float(frames / took_s)

        try:
            yield play
        finally:
            asks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of rlsync to compare with")
    parser.add_argument("--peer-venv", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vector", action="store_true", help="the environments alone")
    parser.add_argument("--only", nargs="*", default=[""], help="rows that begin so")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    with ExitStack() as started:
        here = Path(__file__).resolve().parents[1]
        ours = started.enter_context(contender(sys.executable, here))
        before = None
        if options.before is not None:
            before = started.enter_context(contender(sys.executable, options.before.resolve()))
        rows: dict[str, tuple[Callable[[str, int, int], float], str, int]] = {}
        if options.vector:
            rows |= {
                "as workers step them": (ours, "ours", 0),
                "gymnasium, SyncVectorEnv": (ours, "bare", 0),
            }
            rows["gymnasium, CartPoleVectorEnv"] = (ours, "vector", 0)
            if before is not None:
                rows["as workers stepped them before"] = (before, "ours", 0)
        else:
            for name, kind in (("worker", "impala"), ("q worker", "q")):
                for steps in UNROLLS:
                    if before is not None:
                        rows[f"{name} {steps}, before"] = (before, kind, steps)
                    rows[f"{name} {steps}"] = (ours, kind, steps)
            rows["bare step"] = (ours, "bare", 0)
            from peers.venvs import STABLE_BASELINES

            python = str(STABLE_BASELINES.python(options.peer_venv))
            rows["SB3"] = (started.enter_context(contender(python, None)), "sb3", SB3_STEPS)
        rows = {name: row for name, row in rows.items() if name.startswith(tuple(options.only))}
        counts = VECTORS if options.vector else ENVS
        best = {(name, envs): 0.0 for name in rows for envs in counts}
        for _ in range(options.rounds):
            for envs in counts:
                for name, (play, kind, steps) in rows.items():
                    best[name, envs] = max(best[name, envs], play(kind, envs, steps))
    print("| frames a second | " + " | ".join(f"{envs} environments" for envs in counts) + " |")
    print("| --- |" + " ---: |" * len(counts))
    for name in rows:
        cells = " | ".join(f"{best[name, envs]:,.0f}" for envs in counts)
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
