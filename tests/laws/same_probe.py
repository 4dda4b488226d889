"""Run cases of ``make same`` with the rlsync on PYTHONPATH.

There is one for each line of JSON on standard input, with its digests as such a line on standard output.

That rlsync may be an older one, so this file leans on nothing but the command line, public names of rlsync
and TorchRL. tests/laws/same.py says which cases there are. TorchRL is imported once: each case runs in a
child of this process, and forks its workers.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.func import functional_call
from torchrl.collectors import (
    AsyncBatchedCollector,
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.envs import EnvBase, GymEnv
from torchrl.trainers import Trainer
from torchrl.weight_update import SharedMemWeightSyncScheme

import rlsync

#: Of what a batch carries: what the environments and the policy did, and which weights acted.
STAMPS = ("policy_version",)
FRAMES = ("action", "observation", ("next", "reward"), ("next", "done"))


class Digest:
    """A running digest of tensors and numbers."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)
        self.count = 0

    def add(self, *values: object) -> None:
        for value in values:
            if isinstance(value, Tensor):
                whole = value.detach().cpu().contiguous()
                self._hash.update(f"{tuple(whole.shape)} {whole.dtype}".encode())
                self._hash.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                self._hash.update(repr(value).encode())
        self.count += 1

    def __str__(self) -> str:
        return f"{self._hash.hexdigest()} of {self.count}"


def tensors(state: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nested state, by name."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from tensors(state[key], f"{name}.{key}")
    elif isinstance(state, (list, tuple)):
        for i, part in enumerate(state):
            yield from tensors(part, f"{name}.{i}")


def digest_of(state: object) -> str:
    digest = Digest()
    for name, tensor in tensors(state):
        digest.add(name, tensor)
    return str(digest)


class Watch:
    """What one training does, as digests."""

    def __init__(self) -> None:
        self.stamps, self.frames, self.losses = Digest(), Digest(), Digest()
        self.trainer: Trainer | None = None

    def train(self, train: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def watched(trainer: Trainer) -> None:
            self.trainer = trainer
            trainer.register_op("batch_process", self._batch)
            trainer.register_op("post_optim_complete_log", self._loss)
            train(trainer)

        return watched

    def _batch(self, batch: TensorDictBase) -> TensorDictBase:
        for key in STAMPS:
            self.stamps.add(batch.get(key))
        for key in FRAMES:
            value = batch.get(key, None)
            if isinstance(value, Tensor):
                self.frames.add(value)
        return batch

    def _loss(self, _: int, out: Any) -> None:
        if isinstance(out, TensorDictBase):
            for key in sorted(key for key in map(str, out.keys()) if key.startswith("loss")):
                self.losses.add(key, out.get(key))

    def digests(self) -> dict[str, str]:
        trainer = self.trainer
        assert trainer is not None, "the training never began"
        optimizer = {} if trainer.optimizer is None else trainer.optimizer.state_dict()
        receipts = [
            (r.version, r.reason, r.copied_leaves, r.aliased_leaves, r.copied_bytes, r.frames, r.optim_steps)
            for part in trainer._modules.values()
            for r in getattr(part, "receipts", ())
        ]
        publishes = Digest()
        publishes.add(*receipts)
        return {
            "stamps": str(self.stamps),
            "frames": str(self.frames),
            "losses": str(self.losses),
            "weights": digest_of(dict(trainer.loss_module.state_dict())),
            "optimizer": digest_of(optimizer),
            "publishes": f"{publishes}, {len(receipts)} receipts",
        }


def trained(words: list[str], folder: Path) -> dict[str, str]:
    """The digests of one run of ``rlsync train``."""
    from rlsync.__main__ import main

    watch = Watch()
    Trainer.train = watch.train(Trainer.train)  # type: ignore[method-assign]
    status = main(["train", *words, f"run_dir={folder / 'run'}", "logger=none"])
    assert status == 0, f"rlsync train ended with {status}"
    return watch.digests()


# --------------------------------------------------------------------- a run, recorded and made again

CANNOT_BE_MADE_AGAIN = 2  # the status of such a ``rlsync rerun``


def recorded(words: list[str], run: Path) -> dict[str, str]:
    """Train, for :func:`made_again`."""
    from rlsync.__main__ import main

    status = main(["train", *words, f"run_dir={run}", "logger=none"])
    assert status == 0, f"rlsync train ended with {status}"
    return {}


def made_again(words: list[str], run: Path, folder: Path) -> dict[str, str]:
    """How the digests of a recorded run compare with those of its rerun.

    Where there is no record that this rlsync can read, it records the run itself; then a difference is an
    error, whatever was altered.
    """
    from rlsync.__main__ import main

    told = io.StringIO()
    with redirect_stdout(told):
        status = main(["rerun", str(run), f"--into={folder / 'again'}", "--json", "--trust"])
    own = folder / "own"
    if status == CANNOT_BE_MADE_AGAIN:
        assert run != own, "what was recorded here cannot be made again"
        recorded(words, own)
        return made_again(words, own, folder)
    found = json.loads(told.getvalue().splitlines()[-1])
    if status == 0:
        return {"digests": "equal"}
    where = f"unequal at version {found['unequal']}" if found["unequal"] else "none"
    digests = f"{where}: {', '.join(found['leaves'])}; {found['window']}"
    assert run != own, f"what was recorded here was not made again: {digests}"
    return {"digests": digests}


# --------------------------------------------------------------------- one publish through each endpoint

FRAMES_PER_BATCH = 40
BATCHES = 5


def make_env() -> EnvBase:
    return GymEnv("Pendulum-v1", device="cpu")


def make_policy() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


class Falling(nn.Module):
    """A loss whose gradients do not depend on the frames, so that racing workers change nothing."""

    def __init__(self, actor: TensorDictModule) -> None:
        super().__init__()
        self.actor_network = actor

    def forward(self, batch: TensorDictBase) -> TensorDict:
        return TensorDict({"loss_all": sum(p.sum() for p in self.actor_network.parameters())}, [])


def collector_on(endpoint: str, policy: TensorDictModule) -> BaseCollector:
    counts: dict[str, Any] = {"frames_per_batch": FRAMES_PER_BATCH, "total_frames": -1}
    enough = {**counts, "total_frames": 10_000}
    stamped = {**counts, "track_policy_version": True}
    adopt = "copy" if endpoint.endswith("copy") else "alias"
    board = {"policy": rlsync.BoardScheme(adopt)}
    match endpoint:
        case "in_process":
            return Collector(make_env, copy.deepcopy(policy), **stamped)
        case "shared":
            return Collector(make_env, policy, **stamped)
        case "sync-alias" | "sync-copy":
            return MultiSyncCollector([make_env] * 2, policy, weight_sync_schemes=board, **stamped)
        case "async":
            return MultiAsyncCollector([make_env] * 2, policy, weight_sync_schemes=board, **stamped)
        case "stock":
            schemes = {"policy": SharedMemWeightSyncScheme()}
            return MultiSyncCollector([make_env] * 2, policy, weight_sync_schemes=schemes, **stamped)
        case "server":
            return AsyncBatchedCollector(
                [make_env] * 2, policy=policy, weight_sync=rlsync.BoardScheme(), **counts
            )
        case "distributed":
            return DistributedCollector(
                [make_env] * 2,
                policy,
                launcher="mp",
                tcp_port=free_port(),
                weight_sync_schemes=board,
                **enough,
            )
        case "ray":
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
            return RayCollector(
                [make_env] * 2,
                policy,
                collector_kwargs={"track_policy_version": True},
                remote_configs={"num_cpus": 0.1, "memory": 1},
                weight_sync_schemes={"policy": rlsync.RayBoardScheme()},
                **enough,
            )
    raise ValueError(endpoint)


def published(endpoint: str) -> dict[str, str]:
    """The receipts of a few publishes, and whether each frame was made by the weights that it names."""
    policy = make_policy()
    loss = Falling(policy)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)
    # A scheme publishes its policy as version 1 when the collector is made.
    versions = {1: {name: p.detach().clone() for name, p in policy.module.named_parameters()}}
    wrong = frames = 0

    with closing(collector_on(endpoint, policy)) as collector:
        trainer = Trainer(
            collector=collector,
            total_frames=BATCHES * FRAMES_PER_BATCH,
            loss_module=loss,
            optimizer=optimizer,
            optim_steps_per_batch=1,
            frame_skip=1,
            progress_bar=False,
        )
        sync = rlsync.SyncWeights({"policy": "loss_module.actor_network"})
        sync.register(trainer)

        def keep() -> None:
            weights = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
            versions.setdefault(sync.version, weights)

        def count(batch: TensorDictBase) -> TensorDictBase:
            nonlocal wrong, frames
            keep()
            for step in batch.reshape(-1):
                acts = functional_call(
                    policy.module, versions[int(step["policy_version"])], (step["observation"],)
                )
                wrong += not torch.allclose(acts, step["action"], atol=1e-5)
                frames += 1
            return batch

        if endpoint != "stock":  # its stamps may be wrong, as its plan says
            trainer.register_op("batch_process", count)
        trainer.register_op("post_steps", keep)
        trainer.train()
        receipts = [
            (
                r.version,
                r.reason,
                r.copied_leaves,
                r.aliased_leaves,
                r.cast_leaves,
                r.copied_bytes,
                r.aliased_bytes,
            )
            for r in sync.receipts
        ]
    return {
        "receipts": repr(receipts),
        "frames of other weights than they name": f"{wrong} of {frames}",
        "weights": digest_of(dict(policy.state_dict())),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def closing(collector: BaseCollector) -> Iterator[BaseCollector]:
    try:
        yield collector
    finally:
        collector.shutdown()


def result_of(words: list[str], folder: Path) -> dict[str, str]:
    """What one case gives; an error counts as a result."""
    try:
        if words[0].startswith("publish="):
            return published(words[0].removeprefix("publish="))
        verb, _, run = words[0].partition("=")
        if verb == "record":
            return recorded(words[1:], Path(run))
        if verb == "rerun":
            return made_again(words[1:], Path(run), folder)
        return trained(words, folder)
    except BaseException:
        return {"error": traceback.format_exc()[-2000:]}


def alone(words: list[str]) -> str:
    """The result of a case that runs in a child of its own, as JSON."""
    with tempfile.TemporaryDirectory(prefix="same") as folder:
        result = Path(folder) / "result"
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that what it leaves can be ended with it
            os.chdir(folder)
            with Path("output").open("w") as output, Path(os.devnull).open() as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            result.write_text(json.dumps(result_of(words, Path(folder))))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if result.is_file():
            return result.read_text()
        return json.dumps({"error": (Path(folder) / "output").read_text()[-2000:]})


def main() -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    for line in sys.stdin:
        if line.strip():
            print("digests", alone(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
