"""Whatever torch's default device is, what rlsync makes for itself is where it says."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torchrl.collectors import MultiSyncCollector

import rlsync
from rlsync import BoardScheme, BoundStaleness, Every, LogReceipts, RecordSchedule, SyncWeights, VerifySync
from rlsync.runs.recipes.impala import Categorical, CollectSettings, GymnasiumEnvs, ImpalaNet, UnrollCollector
from rlsync.tensors.device import shared_memory
from rlsync.tensors.digest import digest
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer
from tests.tools.parts import ACTIONS, make_mlp, make_ppo_loss, make_workers
from tests.tools.running import running

SOURCES, TORCH = Path(rlsync.__file__).parent, Path(torch.__file__).parent


class UnnamedDevices(TorchFunctionMode):
    """Counts the tensors that lines of rlsync make without a device.

    Except in the constructors of modules: parameters and buffers are where torch's default says.
    """

    made = _device_constructors()

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.made and (kwargs or {}).get("device") is None:
            self._look(func.__name__, sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _look(self, name: str, frame: FrameType | None) -> None:
        while frame is not None:
            where = frame.f_code
            if where.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
                return
            parents = Path(where.co_filename).parents
            if SOURCES in parents:
                self.lines[f"{name} {where.co_filename}:{frame.f_lineno}"] += 1
            if TORCH not in parents:
                return
            frame = frame.f_back


@pytest.mark.seconds
def test_every_line_that_makes_a_tensor_names_its_device() -> None:
    names = {function.__name__ for function in _device_constructors()}
    unnamed = []
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        of_modules = [
            function
            for kind in ast.walk(tree)
            if isinstance(kind, ast.ClassDef) and any("Module" in ast.unparse(base) for base in kind.bases)
            for function in kind.body
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        ]
        follows_default = {id(node) for function in of_modules for node in ast.walk(function)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            match call.func:
                case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in names:
                    named = any(keyword.arg == "device" for keyword in call.keywords)
                    if not named and id(call) not in follows_default:
                        unnamed.append(f"{path}:{call.lineno}: {ast.unparse(call)}")
    assert unnamed == []


def test_memory_and_digests_are_the_same_under_another_default_device() -> None:
    whole = torch.arange(100.0)
    views = [whole[:10], whole[50:60]]
    expected = digest([whole])
    with torch.device("meta"):
        memory = shared_memory(views)
        assert digest([whole]) == expected
    assert memory is not None
    assert memory.is_cpu


@pytest.mark.processes
@pytest.mark.seconds
def test_a_training_on_a_board_makes_no_tensor_without_a_device(tmp_path: Path) -> None:
    schemes = {"policy": BoardScheme()}
    with (
        running(make_workers(MultiSyncCollector, actor_of(make_mlp(ACTIONS)), schemes=schemes)) as collector,
        UnnamedDevices() as spy,
    ):
        trainer = make_trainer(collector, make_ppo_loss(actor_of(make_mlp(ACTIONS))), batches=6)
        sync = SyncWeights(ACTOR, when=Every(1, "batches"))
        sync.register(trainer)
        verify = VerifySync(sync, Every(1, "batches"), behaviour=Every(1, "batches"))
        for hook in (LogReceipts(sync), BoundStaleness(sync, 3), verify):
            hook.register(trainer)
        RecordSchedule(sync, tmp_path / "schedule.bin", every=1).register(trainer)
        trainer.train()
        sync.load_state_dict(sync.state_dict())
    assert verify.behaviour_held is not None
    assert spy.lines == {}


@pytest.mark.processes
@pytest.mark.seconds
def test_an_unroll_collector_makes_no_tensor_without_a_device() -> None:
    with UnnamedDevices() as spy:
        net = ImpalaNet((4,), Categorical(2))
        collector = UnrollCollector(
            net, GymnasiumEnvs("CartPole-v1"), CollectSettings(steps=5, envs_per_worker=2), num_workers=1
        )
        with running(collector):
            batches = iter(collector)
            for _ in range(2):
                next(batches)
                collector.update_policy_weights_()
    assert spy.lines == {}
