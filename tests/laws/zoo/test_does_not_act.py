"""Weights that are trained, sent and received, with which the policy does not compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torchrl.collectors import BaseCollector, Collector, MultiSyncCollector
from torchrl.envs import ExplorationType, SerialEnv, exploration_type, set_exploration_type
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Every, Source, SyncWeights, VerifySync
from tests.laws.zoo.parts import ACTOR, Row, actor_of, make_trainer, register, same, sends, verify
from tests.tools.parts import (
    ACTIONS,
    FRAMES_PER_BATCH,
    OBSERVATIONS,
    make_collector,
    make_counting_env,
    make_mlp,
    make_ppo_loss,
    make_workers,
)
from tests.tools.parts.acting import Attention, Functional, Normalised, Packed, Scaled, Spare, Twice, Twin
from tests.tools.running import running

X = torch.ones(1, OBSERVATIONS)


class Traced(nn.Module):
    """Computes with a trace of a copy."""

    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self.net = make_mlp(ACTIONS)
        traced = torch.jit.trace(copy.deepcopy(self.net).requires_grad_(False), X)
        self.twin = [self.net if live else traced]

    def forward(self, x: Tensor) -> Tensor:
        return self.twin[0](x)


class Quantised(nn.Module):
    """Computes with eight bits a weight, taken from the weights of the start."""

    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self.net, self.live = nn.Linear(OBSERVATIONS, ACTIONS), live
        self.scale = self.net.weight.detach().abs().max().item() / 127
        self.bits = (self.net.weight.detach() / self.scale).round().to(torch.int8)
        self.first_bias = self.net.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.live else x @ (self.bits * self.scale).t() + self.first_bias


class Ensemble(nn.Module):
    """Averages members whose weights were stacked once, for vmap."""

    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self.members, self.live = nn.ModuleList(make_mlp(ACTIONS) for _ in range(2)), live
        stacked, buffers = stack_module_state(list(self.members))
        self.held = {name: tensor.detach() for name, tensor in stacked.items()}, buffers
        self.base = [copy.deepcopy(self.members[0])]

    def forward(self, x: Tensor) -> Tensor:
        if self.live:
            return torch.stack([member(x) for member in self.members]).mean(0)
        call = vmap(lambda held, buffers: functional_call(self.base[0], (held, buffers), (x,)))
        return call(*self.held).mean(0)


class Merged(nn.Module):
    """A frozen layer with an adapter of low rank, which was merged into it at the start."""

    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self.base = nn.Linear(OBSERVATIONS, ACTIONS).requires_grad_(False)
        self.down, self.up = nn.Linear(OBSERVATIONS, 1, bias=False), nn.Linear(1, ACTIONS, bias=False)
        self.live, self.merged = (
            live,
            copy.deepcopy(self.base).weight + (self.up.weight @ self.down.weight).detach(),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.live:
            return self.base(x) + self.up(self.down(x))
        return x @ self.merged.t() + self.base.bias


def still(policy: nn.Module) -> Tensor:
    """What a policy answers."""
    with torch.no_grad():
        return policy.module[0].module(X).clone()


def answers_stand_still(make: Callable[[bool], nn.Module]) -> bool:
    """Train with weights that a user sends. Whether what acts has received them, and answers as before."""
    trainer = make_trainer(make_collector(actor_of(make(False))), make_ppo_loss(actor_of(make(True))))
    acting, learner = trainer.collector.policy, trainer.loss_module.actor_network
    first = still(acting)
    sends(trainer, lambda: acting.load_state_dict(learner.state_dict()))
    trainer.train()
    sent = zip(acting.parameters(), learner.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in sent) and torch.equal(still(acting), first)


def named(fault: Row, kind: Callable[..., nn.Module]) -> None:
    def make(live: bool) -> nn.Module:
        return kind(live=live)

    assert answers_stand_still(make)
    for live in (False, True):
        trainer = make_trainer(make_collector(actor_of(make(live))), make_ppo_loss(actor_of(make(True))))
        said = register(trainer)
        assert said.lines == () if live else fault.is_named(said) is None


def test_a_policy_calls_itself_with_the_parameters_of_the_start(row: Row) -> None:
    named(row, partial(Functional, copies=True))


def test_a_policy_computes_with_a_twin(row: Row) -> None:
    named(row, partial(Twin, copies=True))


def test_a_policy_computes_with_a_trace_of_a_copy(row: Row) -> None:
    named(row, Traced)


def test_a_policy_computes_with_quantised_weights_of_the_start(row: Row) -> None:
    named(row, Quantised)


@pytest.mark.seconds
def test_an_ensemble_stacked_its_members_once(row: Row) -> None:
    named(row, Ensemble)


def acts_as_from_the_start(kind: Callable[..., nn.Module]) -> bool:
    """Whether a policy that acted before its weights were loaded answers as one that computes with them."""
    answers = []
    weights = kind(live=True).state_dict()
    for live in (False, True):
        policy = kind(live=live)
        policy(X)
        policy.load_state_dict(weights)
        answers.append(policy(2 * X))
    return torch.allclose(*answers)


def test_a_weight_acts_twice_as_it_is_and_as_a_call_packed_it(row: Row) -> None:
    named_of_older_weights(row, Twice)


def test_an_attention_keeps_keys_and_values_of_older_weights(row: Row) -> None:
    named_of_older_weights(row, Attention)


def named_of_older_weights(fault: Row, kind: type[nn.Module]) -> None:
    assert not acts_as_from_the_start(kind)
    for live in (False, True):
        learner = make_ppo_loss(actor_of(kind(live=True)))
        said = register(make_trainer(make_collector(actor_of(kind(live=live))), learner))
        assert said.lines == () if live else fault.is_named(said) is None


def test_adapters_were_merged_once(row: Row) -> None:
    for live in (False, True):
        acting, learner = actor_of(Merged(live=live)), make_ppo_loss(actor_of(Merged(live=True)))
        said = register(make_trainer(make_collector(acting), learner))
        assert said.lines == () if live else row.is_named(said) is None


def test_the_policy_of_the_workers_does_not_ask_a_head_of_the_learner(row: Row) -> None:
    for live in (False, True):
        acting, learner = actor_of(Spare(live=live)), make_ppo_loss(actor_of(Spare(live=True)))
        said = register(make_trainer(make_collector(acting), learner))
        assert said.lines == () if live else row.is_named(said) is None


def compared(acting: nn.Module, learner: nn.Module) -> Trainer:
    """A trainer whose VerifySync compares what acts with what the learner's module computes."""
    return verifies(make_collector(actor_of(acting)), learner)


def verifies(collector: BaseCollector, learner: nn.Module) -> Trainer:
    trainer = make_trainer(collector, make_ppo_loss(actor_of(learner)), batches=4)
    idle = Source(ACTOR["policy"], idle=("*",))
    sync = SyncWeights({"policy": idle})
    sync.register(trainer)
    VerifySync(sync, when=Every(1), behaviour=Every(1)).register(trainer)
    return trainer


def test_a_dropout_drops_in_the_workers_and_not_in_the_learner(row: Row) -> None:
    def build(drops: float) -> Trainer:
        learner = make_ppo_loss(actor_of(Scaled(drops=0.5)))
        return make_trainer(make_collector(actor_of(Scaled(drops=drops))), learner)

    trainer = build(0.0)
    acting, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: acting.load_state_dict(learner.state_dict())).train()
    assert same(acting, learner)
    torch.manual_seed(0)
    assert not torch.allclose(still(acting), still(learner))
    row.is_named(register(build(0.0)))
    assert register(build(0.5)).lines == ()


def test_a_batch_norm_acts_with_the_statistics_of_the_rows_at_hand(row: Row) -> None:
    def build(*, trains: bool) -> Trainer:
        acting = actor_of(Normalised(nn.BatchNorm1d(ACTIONS))).train(trains)
        two = partial(SerialEnv, 2, make_counting_env)
        collector = Collector(two, acting, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1)
        return make_trainer(collector, make_ppo_loss(actor_of(Normalised(nn.BatchNorm1d(ACTIONS)))))

    trainer = build(trains=True)
    acting, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: acting.load_state_dict(learner.state_dict())).train()
    rows = torch.cat([X, 2 * X])
    net = acting.module[0].module
    assert not torch.allclose(net(rows)[0], net(torch.cat([X, 3 * X]))[0])
    row.is_named(register(build(trains=True)))
    assert register(build(trains=False)).lines == ()


def test_adapters_are_kept_in_a_plain_dict(row: Row) -> None:
    def build(*, plain: bool) -> Trainer:
        acting, learner = Adapted(plain=plain), Adapted(plain=plain)
        loss = make_ppo_loss(actor_of(learner))
        trained = {id(t): t for t in (*loss.parameters(), *learner.adapters.values())}
        return make_trainer(make_collector(actor_of(acting)), loss, trained.values())

    trainer = build(plain=True)
    acting, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: acting.load_state_dict(learner.state_dict())).train()
    assert same(acting, learner)
    assert not torch.allclose(still(acting), still(learner))
    row.is_named(register(build(plain=True)))
    assert register(build(plain=False)).lines == ()


class Adapted(nn.Module):
    """A layer with an adapter, which is a parameter of the module or of nobody."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.base, adapter = nn.Linear(OBSERVATIONS, ACTIONS), torch.zeros(ACTIONS, OBSERVATIONS)
        self.adapters = {"a": nn.Parameter(adapter)} if plain else nn.ParameterDict({"a": adapter})

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.adapters["a"].t()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("freezes", [True, False])
def test_the_compiler_froze_the_weights(row: Row, freezes: bool) -> None:
    acting = actor_of(make_mlp(ACTIONS)).eval()
    backend = "inductor" if freezes else "eager"
    acting.module[0].module = torch.compile(acting.module[0].module, backend=backend)
    with inductor.patch(freezing=freezes):
        trainer = make_trainer(make_collector(acting), make_ppo_loss(actor_of(make_mlp(ACTIONS))))
        first = still(acting)
        with torch.no_grad():
            for name, parameter in acting.named_parameters():
                parameter.add_("bias" in name)
        assert torch.equal(first, still(acting)) is freezes
        said = register(trainer)
    assert said.lines == () if not freezes else row.is_named(said) is None


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore::rlsync.OlderWeightsAct")
def test_a_worker_packs_a_weight_once(row: Row) -> None:
    for packs in (True, False):
        board = {"policy": BoardScheme()}
        acting = actor_of(Packed(live=not packs))
        with running(make_workers(MultiSyncCollector, acting, schemes=board, workers=1)) as collector:
            said = verify(verifies(collector, Packed(live=True)))
        assert said.lines == () if not packs else row.is_named(said) is None


def test_a_number_in_the_module_differs(row: Row) -> None:
    trainer = make_trainer(make_collector(actor_of(Scaled(2.0))), make_ppo_loss(actor_of(Scaled())))
    policy, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: policy.load_state_dict(learner.state_dict())).train()
    assert torch.allclose(still(policy), 2 * still(learner))
    row.is_named(verify(compared(Scaled(2.0), Scaled())))
    assert verify(compared(Scaled(), Scaled())).lines == ()


class TwoLayers(nn.Module):
    """Two layers of one shape; which comes first is no weight."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(OBSERVATIONS, OBSERVATIONS), nn.Linear(OBSERVATIONS, OBSERVATIONS)
        self.head, self.turned = nn.Linear(OBSERVATIONS, ACTIONS), turned

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.two, self.one) if self.turned else (self.one, self.two):
            x = torch.tanh(layer(x))
        return self.head(x)


def test_two_layers_come_in_another_order(row: Row) -> None:
    acting, learning = actor_of(TwoLayers(turned=True)), actor_of(TwoLayers())
    trainer = make_trainer(make_collector(acting), make_ppo_loss(learning))
    policy, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: policy.load_state_dict(learner.state_dict())).train()
    assert not torch.allclose(still(policy), still(learner))
    row.is_named(verify(compared(TwoLayers(turned=True), TwoLayers())))
    assert verify(compared(TwoLayers(), TwoLayers())).lines == ()


def test_a_plain_tensor_of_statistics_differs(row: Row) -> None:
    trainer = make_trainer(make_collector(actor_of(Scaled(mean=1.0))), make_ppo_loss(actor_of(Scaled())))
    policy, learner = trainer.collector.policy, trainer.loss_module.actor_network
    sends(trainer, lambda: policy.load_state_dict(learner.state_dict())).train()
    assert not torch.allclose(still(policy), still(learner))
    row.is_named(verify(compared(Scaled(mean=1.0), Scaled())))
    assert verify(compared(Scaled(mean=1.0), Scaled(mean=1.0))).lines == ()


class Exploring(nn.Module):
    """Explores by noise, which may be drawn from a generator that each call sets back."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.net, self.repeats, self.generator = make_mlp(ACTIONS), repeats, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x)
        if exploration_type() is not ExplorationType.RANDOM:
            return logits
        if self.repeats:  # as a CUDA graph does whose generator was not registered
            self.generator.manual_seed(0)
        return logits + torch.randn(logits.shape, generator=self.generator)


def test_noise_that_repeats_is_not_named_because_outputs_are_compared_without_exploration() -> None:
    for repeats in (True, False):
        trainer = verifies(make_collector(actor_of(Exploring(repeats=repeats))), Exploring(repeats=False))
        assert verify(trainer).lines == ()
        policy = trainer.collector.policy
        with set_exploration_type(ExplorationType.RANDOM):
            assert torch.equal(still(policy), still(policy)) is repeats, "the fault"
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            assert torch.equal(still(policy), still(policy)), "what is compared"
