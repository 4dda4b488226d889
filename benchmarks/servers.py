"""An inference server on a board: torn and misnamed environment steps, and what publishing costs.

    python benchmarks/servers.py canary [--servers process thread] [--steps 1000000] [--adopt alias]
    python benchmarks/servers.py cost   [--servers process thread] [--turns 10] [--turn-seconds 3] [--rate 10]
                                        [--width 512] [--out servers.json]

**canary**: every weight of the policy (64 tensors of 128 x 128) holds the number of the version. The learner
publishes without a pause. Each step of each environment reports the smallest and the largest weight that its
answer was made with, and its stamp. Different weights are a torn read, another stamp is a misnamed one. With
a server in a process, each worker process steps 64 environments at once; TorchRL's pool, which goes with a
server in a thread, takes single environments only. The script ends with status 1 if it finds either fault.

**cost**: the policy is an MLP. In turns within one run, the learner publishes at a fixed rate or not at all.
The loss of throughput is the difference between the two; on a machine that others use, too, it may be smaller
than what it is uncertain by. **held** is how long one publish holds the learner while the server answers, and
**memcpy** one copy of the same bytes just before it. **adopt** is the processor time that the server spends
on one adoption, and **poll** that of a look between two batches that finds nothing new.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.collectors import AsyncBatchedCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules.inference_server import (
    InferenceServer,
    InferenceServerConfig,
    ProcessSlotTransport,
)

from rlsync import BoardScheme

ENVS, WIDE, WIDTH = 2, 64, 8


class StillEnv(EnvBase):
    """Environments that step at once, show zeros and never end.

    Args:
        shape: how many; empty for a single one.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__(device="cpu", batch_size=shape)
        self.observation_spec = Composite(observation=Unbounded((*shape, WIDTH)), shape=shape)
        self.action_spec = Unbounded((*shape, 1))
        self.reward_spec = Unbounded((*shape, 1))

    def _observe(self) -> TensorDict:
        return TensorDict({"observation": torch.zeros(*self.batch_size, WIDTH)}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDict:
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        done = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return self._observe().update(
            {"reward": done.float(), "done": done, "terminated": done.clone()}
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Canary(TensorDictModuleBase):
    """Acts with zeros, and says which weights it has."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "low", "high"]
        self.weights = nn.ParameterList(torch.zeros(128, 128) for _ in range(64))

    @torch.no_grad()
    def fill(self, version: int) -> Canary:
        for weight in self.weights:
            weight.fill_(version)
        return self

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = torch.stack([torch.stack(torch.aminmax(weight.detach())) for weight in self.weights])
        shape = tensordict.batch_size
        tensordict.set("action", torch.zeros(*shape, 1))
        tensordict.set("low", seen.min().expand(shape).clone())
        return tensordict.set("high", seen.max().expand(shape).clone())


def make_mlp(width: int) -> TensorDictModule:
    """4 * width * width bytes, and a little."""
    hidden = nn.Linear(width, width)
    net = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(width, 1))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def make_collector(
    server: str, scheme: BoardScheme, policy: Callable[[], nn.Module]
) -> AsyncBatchedCollector:
    shape = () if server == "thread" else (WIDE,)
    if server == "thread":
        options = {"env_backend": "threading"}
    else:
        request = TensorDict({"observation": torch.zeros(WIDE, WIDTH)}, [WIDE])
        with torch.no_grad():
            response = policy()(request.clone()).exclude("observation")
        response.set("policy_version", torch.zeros(WIDE, dtype=torch.int64))
        options = {
            "transport": ProcessSlotTransport(request, response, num_slots=ENVS),
            "server_config": InferenceServerConfig(service_backend="process", max_batch_size=ENVS),
            "transition_chunk_size": 16,
        }
    return AsyncBatchedCollector(
        [partial(StillEnv, shape)] * ENVS,
        policy_factory=policy,
        frames_per_batch=32 * max(1, math.prod(shape)),
        total_frames=-1,
        weight_sync=scheme,
        **options,
    )


class Publishing:
    """Calls ``publish()`` in a thread, without a pause, while the block runs."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._publish()

    def __enter__(self) -> Publishing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def canary(server: str, steps: int, adopt: str) -> dict[str, object]:
    scheme, learner = BoardScheme(adopt), Canary()
    collector = make_collector(server, scheme, Canary)
    scheme.init_on_sender(model_id="policy", context=collector)
    board = scheme.board

    def publish() -> None:
        scheme.send(learner.fill(board.version + 1))

    publish()
    batches = iter(collector)
    next(batches)  # all processes stand
    seen, torn, misnamed, versions = 0, 0, 0, 0
    started, newest = time.monotonic(), 0
    with Publishing(publish):
        while seen < steps:
            batch = next(batches)
            low, high = batch["low"], batch["high"]
            root, after = batch["policy_version"], batch["next", "policy_version"]
            seen += low.numel()
            torn += int((low != high).sum())
            misnamed += int(((root != low) | (after != low)).sum())
            stamps = root.unique()
            versions += int((stamps > newest).sum())
            newest = max(newest, int(stamps.max()))
    elapsed_s = time.monotonic() - started
    collector.shutdown()
    return {
        "server": server,
        "adopt": adopt,
        "steps": seen,
        "answers": seen // (1 if server == "thread" else WIDE),
        "published": board.version,
        "versions_that_acted": versions,
        "torn": torn,
        "misnamed": misnamed,
        "seconds": round(elapsed_s, 1),
    }


def cost(server: str, turns: int, turn_s: float, rate: float, width: int) -> dict[str, object]:
    scheme, learner = BoardScheme(), make_mlp(width)
    collector = make_collector(server, scheme, partial(make_mlp, width))
    scheme.init_on_sender(model_id="policy", context=collector)
    held: list[float] = []
    copied: list[float] = []
    image = torch.cat([parameter.detach().flatten() for parameter in learner.parameters()])
    room = torch.empty_like(image)

    def publish() -> None:
        begun = time.perf_counter()
        room.copy_(image)  # in the same moment, so with as cold a cache
        between = time.perf_counter()
        scheme.send(learner)
        held.append(time.perf_counter() - between)
        copied.append(between - begun)

    publish()
    batches = iter(collector)
    frames_per_s: dict[bool, list[float]] = {True: [], False: []}
    _frames_per_s(batches, turn_s, publish, 1.0 / rate)  # warm
    for turn in range(2 * turns):
        publishes = turn % 4 in (0, 3)  # neither way always comes first
        every_s = 1.0 / rate if publishes else math.inf
        frames_per_s[publishes].append(_frames_per_s(batches, turn_s, publish, every_s))
    collector.shutdown()
    adopt_us, poll_us = _in_the_server(width)
    quiet, busy = (statistics.median(frames_per_s[way]) for way in (False, True))
    return {
        "server": server,
        "megabytes": round(4 * image.numel() / 1e6, 1),
        "publishes_per_s": rate,
        "steps_per_s_quiet": round(quiet),
        "steps_per_s_publishing": round(busy),
        "loss_percent": round(100 * (1 - busy / quiet), 2),
        "loss_uncertain_by_percent": round(100 * _uncertain(frames_per_s[False]) / quiet, 2),
        "learner_held_percent": round(100 * statistics.median(held) * rate, 3),
        "adopt_us": round(adopt_us, 1),
        "poll_us": round(poll_us, 1),
        "held_us": round(1e6 * statistics.median(held), 1),
        "memcpy_us": round(1e6 * statistics.median(copied), 1),
    }


def _frames_per_s(
    batches: Iterator[TensorDictBase], seconds: float, publish: Callable[[], None], every_s: float
) -> float:
    """Take batches, and publish between them when it is due, as a learner does."""
    frames, started = 0, time.monotonic()
    due = started + every_s
    while (now := time.monotonic()) < started + seconds:
        frames += next(batches).numel()
        if now >= due:
            publish()
            due += every_s
    return frames / (time.monotonic() - started)


def _in_the_server(width: int) -> tuple[float, float]:
    """Processor time of the serving thread for one adoption, and for one poll that finds nothing new, us."""
    scheme, learner = BoardScheme(), make_mlp(width)
    server = InferenceServer(make_mlp(width), weight_sync=scheme)
    scheme.init_on_sender(model_id="policy", context=server)
    scheme.init_on_receiver(model_id="policy", context=server)
    adopted, polled = [], []
    for _ in range(200):
        scheme.send(learner)
        for taken in (adopted, polled):
            begun = time.thread_time()
            scheme.receive(timeout=0.0)
            taken.append(time.thread_time() - begun)
    return 1e6 * statistics.median(adopted), 1e6 * statistics.median(polled)


def _uncertain(found: list[float]) -> float:
    """By how much the difference of two medians of so many figures may be chance."""
    return 1.25 * statistics.stdev(found) * math.sqrt(2 / len(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["canary", "cost"])
    parser.add_argument(
        "--servers", nargs="+", default=["process", "thread"], choices=["process", "thread"]
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--adopt", default="alias", choices=["alias", "copy"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=10.0, help="publishes a second")
    parser.add_argument(
        "--width", type=int, default=512, help="of the MLP; 4 * width * width bytes"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = {
        "canary": partial(canary, steps=given.steps, adopt=given.adopt),
        "cost": partial(
            cost, turns=given.turns, turn_s=given.turn_seconds, rate=given.rate, width=given.width
        ),
    }[given.what]
    found = []
    for server in given.servers:
        found.append(run(server))
        print(json.dumps(found[-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(row.get("torn") or row.get("misnamed") for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
