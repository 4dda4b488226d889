"""VerifySync: what acts computes what the learner's module computes with that version."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torchrl.modules
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, InitTracker, TransformedEnv
from torchrl.modules import BatchRenorm1d, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss
from torchrl.trainers import Trainer

from rlsync import (
    BoardScheme,
    ConfigError,
    Every,
    OlderWeightsAct,
    PublishError,
    Source,
    SyncWeights,
    VerifySync,
)
from rlsync.core import machine
from rlsync.core.trigger import Trigger
from rlsync.runs.recipes.hooks.measuring import StalenessHistogram, StatisticsHook
from rlsync.sync.sample import Judgement
from rlsync.tensors.derived import keepers, outdate
from rlsync.torchrl_plugin.examine.examine import examine
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer
from tests.tools.parts import (
    ACTIONS,
    OBSERVATIONS,
    CountingEnv,
    make_collector,
    make_counting_env,
    make_dqn_trainer,
    make_mlp,
    make_ppo_loss,
    make_workers,
)
from tests.tools.parts.acting import Normalised, Packed, Scaled, ToldAttention
from tests.tools.programs import ENDS_WITHIN_S
from tests.tools.running import in_three_lines, running

EACH = Every(1, "batches")


class Normed(nn.Module):
    """Statistics that forward() changes in each worker, and dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, ACTIONS), nn.Dropout(0.0))
        self.register_buffer("mean", torch.zeros(4))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        self.mean.lerp_(x.reshape(-1, 4).mean(0), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.update(x)
        return self.net(x - self.mean)


class Restless(Normed):
    """Draws random numbers, and counts its calls, besides."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.calls = nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(super().forward(x)) + self.calls


class Noisy(nn.Module):
    """Adds noise of its own generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.net, self.generator = make_mlp(ACTIONS), generator

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y + torch.rand(y.shape, generator=self.generator)


class Tied(nn.Module):
    """Two layers with one weight, and one layer with two names."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, ACTIONS)
        self.two.weight = self.one.weight
        self.again, self.by = self.one, by

    def forward(self, x: Tensor) -> Tensor:
        return self.by * self.head(torch.tanh(self.again(self.two(torch.tanh(self.one(x))))))


class Masked(nn.Module):
    """Forbids the last choice by an infinite number. Computes the others by a detour, or twice as large."""

    def __init__(self, detour: float = 1.0, by: float = 1.0) -> None:
        super().__init__()
        self.net, self.detour, self.by = make_mlp(ACTIONS), detour, by
        self.register_buffer("forbidden", torch.arange(ACTIONS) == ACTIONS - 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.by * (self.net(x) * self.detour / self.detour)
        return y.masked_fill(self.forbidden, -torch.inf)


class Remembering(nn.Module):
    """Adds what it saw before, which it keeps in an attribute: a tensor, a list, a dict or an object."""

    def __init__(self, memory: object, by: float = 1.0) -> None:
        super().__init__()
        self.net, self.memory, self.by = make_mlp(ACTIONS), memory, by

    def forward(self, x: Tensor) -> Tensor:
        y = self.by * self.net(x)
        match self.memory:
            case list() | deque():
                self.memory.append(y.detach().sum())
                return y + sum(self.memory)
            case dict():
                self.memory["last"] = y.detach().sum() + self.memory.get("last", 0.0)
                return y + self.memory["last"]
        self.memory = y.detach().sum() + (0.0 if self.memory is None else self.memory)
        return y + self.memory

    def mark_weight_update(self) -> None:
        """Its memory is that of an episode, and outlives the weights."""


def verified(
    collector: BaseCollector,
    net: nn.Module,
    *,
    sync_map: dict[str, str | Source] | None = None,
    batches: int = 4,
    lr: float = 1e-2,
) -> tuple[Trainer, VerifySync]:
    trainer = make_trainer(collector, make_ppo_loss(actor_of(net)), batches=batches)
    sync = SyncWeights(sync_map or ACTOR)
    sync.register(trainer)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    hook = VerifySync(sync, when=EACH, behaviour=EACH)
    hook.register(trainer)
    return trainer, hook


def workers(
    net: nn.Module, kind: type[BaseCollector] = MultiSyncCollector, count: int = 2, **scheme: object
) -> BaseCollector:
    return make_workers(kind, actor_of(net), schemes={"policy": BoardScheme(**scheme)}, workers=count)


@contextmanager
def asked_by_hand() -> Iterator[tuple[Callable[[float], None], Callable[[], None], Callable[[], Judgement]]]:
    """Of one worker: what moves all weights and publishes, what asks, and what plays a batch and compares."""
    with running(workers(make_mlp(ACTIONS), count=1)) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(make_mlp(ACTIONS))))
        sync = SyncWeights(ACTOR, trainer=trainer)
        verification, batches = sync.bound.endpoint.verification(), iter(collector)

        def publish(moved: float) -> None:
            with torch.no_grad():
                for parameter in trainer.loss_module.actor_network.parameters():
                    parameter.add_(moved)
            sync.publish()

        def hear() -> Judgement:
            next(batches)
            (judged,) = verification.hear().behaviour
            return judged

        yield publish, lambda: verification.ask(sync.bound.judge), hear


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("make", [lambda: make_mlp(ACTIONS), Normed])
@pytest.mark.each_value
def test_a_right_policy_holds_in_every_worker(
    make: Callable[[], nn.Module], kind: type[BaseCollector]
) -> None:
    with running(workers(make(), kind)) as collector:
        # An asynchronous worker that gets little of the processor answers after some batches of the other.
        trainer, hook = verified(collector, make(), batches=6 if kind is MultiSyncCollector else 100)

        def enough() -> None:
            if kind is MultiAsyncCollector and hook.behaviour_held is not None:
                trainer.request_stop("the outputs were compared, and held")

        trainer.register_op("post_steps", enough)
        trainer.train()
    assert hook.deviations == []
    assert hook.uncompared == ()
    assert hook.behaviour_held is not None
    if kind is MultiSyncCollector:
        assert hook._report()["verify_sync/outputs_held"] == 2


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore::rlsync.OlderWeightsAct")
def test_a_worker_that_acts_with_a_packed_weight_is_named() -> None:
    declared = {"policy": Source("loss_module.actor_network", idle=("*",))}
    with running(workers(Packed())) as collector:
        trainer, _ = verified(collector, Packed(live=True), sync_map=declared, batches=8)
        with pytest.raises(PublishError, match="apart from what the learner's module computes") as raised:
            trainer.train()
    assert in_three_lines(raised.value)
    assert "worker" in raised.value.where


def square_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, ACTIONS))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("publisher", "apart from what the learner's module computes"),  # two weights count as tied
        ("bound_map", "is not copied, as if it were the learner's memory"),  # and one as the learner's own
    ],
)
def test_a_fault_in_the_identity_of_tensors_does_not_fool_the_comparison(
    module: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(make_collector(actor_of(square_layers()))) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(square_layers())), batches=8)
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
        monkeypatch.setattr(f"rlsync.sync.{module}.memory_key", lambda tensor: tuple(tensor.shape))
        (judged,) = examine(trainer, ENDS_WITHIN_S).outputs
        assert named in " ".join(judged.wrong)
    with running(make_collector(actor_of(square_layers()))) as collector:
        trainer, _ = verified(collector, square_layers(), batches=8)
        with pytest.raises(PublishError, match=named):
            trainer.train()


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.one_case
def test_what_the_learner_holds_at_a_publish_is_compared_and_not_what_it_holds_later(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsync.sync.publisher.memory_key", lambda tensor: tuple(tensor.shape))
    with running(workers(square_layers(), count=1)) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(square_layers())), batches=8)
        sync = SyncWeights(ACTOR, background=background)
        sync.register(trainer)
        VerifySync(sync, when=EACH, behaviour=EACH).register(trainer)
        with pytest.raises(PublishError, match="apart from what the learner's module computes"):
            trainer.train()


@pytest.mark.seconds
def test_a_collector_in_this_process_is_compared() -> None:
    began_s = time.time()
    with running(make_collector(actor_of(make_mlp(ACTIONS)))) as collector:
        trainer, hook = verified(collector, make_mlp(ACTIONS))
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None
    statistics = StatisticsHook(hook.sync, StalenessHistogram(hook.sync), None, hook).now()
    assert statistics.outputs_held_version == hook.behaviour_held
    assert began_s <= statistics.outputs_held_time_s <= time.time()
    with running(make_collector(actor_of(Scaled(2.0)))) as collector:
        trainer, _ = verified(collector, Scaled(1.0))
        with pytest.raises(PublishError, match="apart from"):
            trainer.train()


@pytest.mark.seconds
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, BatchRenorm1d])
@pytest.mark.each_value
def test_workers_in_eval_and_a_learner_in_training_mode_are_no_alarm(norm: type[nn.Module]) -> None:
    with running(make_collector(actor_of(Normalised(norm(ACTIONS))).eval())) as collector:
        trainer, hook = verified(collector, Normalised(norm(ACTIONS)), batches=6)
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None
    assert all(part.training for part in trainer.loss_module.actor_network.modules())


@pytest.mark.seconds
@pytest.mark.parametrize("generator", [None, torch.Generator()])
@pytest.mark.one_case
def test_what_draws_random_numbers_is_no_alarm_and_the_parts_inside_it_are_compared(
    generator: torch.Generator | None,
) -> None:
    def make() -> nn.Module:
        return Noisy(generator) if generator is not None else Scaled(drops=0.3)

    with running(make_collector(actor_of(make()))) as collector:
        trainer, hook = verified(collector, make(), batches=10)
        trainer.train()
    assert hook.deviations == []
    assert hook.behaviour_held is not None
    drop = ("policy: the outputs of Dropout module.0.module.drop are random",)
    assert hook.uncompared == (drop if generator is None else ())
    with running(make_collector(actor_of(nn.Sequential(make(), Scaled(2.0, inputs=ACTIONS))))) as collector:
        trainer, _ = verified(collector, nn.Sequential(make(), Scaled(1.0, inputs=ACTIONS)))
        with pytest.raises(PublishError, match=r"Scaled module\.0\.module\.1 gives an output that is"):
            trainer.train()


def test_tied_weights_are_compared_and_the_learner_keeps_its_own() -> None:
    with running(make_collector(actor_of(Tied()))) as collector:
        trainer, hook = verified(collector, Tied(), batches=6)
        held = list(trainer.loss_module.actor_network.parameters())
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None
    now = trainer.loss_module.actor_network.parameters()
    assert all(one is other for one, other in zip(held, now, strict=True))
    with running(make_collector(actor_of(Tied(2.0)))) as collector:
        trainer, _ = verified(collector, Tied(), batches=6)
        with pytest.raises(PublishError, match="apart from"):
            trainer.train()


@pytest.mark.seconds
@pytest.mark.parametrize("by", [1.0, 2.0])
def test_infinite_outputs_are_no_alarm_and_hide_no_fault(by: float) -> None:
    with running(make_collector(actor_of(Masked(3.3, by)))) as collector:
        trainer, hook = verified(collector, Masked(), batches=6)

        @torch.no_grad()
        def move() -> None:  # where one choice is left, nothing is learned
            for parameter in trainer.loss_module.actor_network.parameters():
                parameter.add_(0.1)

        trainer.register_op("post_optim", move)
        if by == 1.0:
            trainer.train()
            assert hook.deviations == []
            assert hook.behaviour_held is not None
        else:
            with pytest.raises(PublishError, match=r"'logits' that is [\d.]+ apart"):
                trainer.train()


@pytest.mark.seconds
@pytest.mark.parametrize("memory", [None, [], {}], ids=["tensor", "list", "dict"])
@pytest.mark.each_value
def test_what_a_policy_remembers_is_no_alarm_and_hides_no_fault(memory: object) -> None:
    with running(make_collector(actor_of(Remembering(copy.deepcopy(memory))))) as collector:
        trainer, hook = verified(collector, Remembering(copy.deepcopy(memory)), batches=6)
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None
    with running(make_collector(actor_of(Remembering(copy.deepcopy(memory), 2.0)))) as collector:
        trainer, _ = verified(collector, Remembering(copy.deepcopy(memory)), batches=6)
        with pytest.raises(PublishError, match="apart from"):
            trainer.train()


class Restarting(ToldAttention):
    """As TorchRL's TransformerModule it begins anew when it sees by itself that its weights are others."""

    weights: tuple[tuple[int, int], ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        present = tuple((each.data_ptr(), each._version) for each in self.parameters())
        if present != self.weights:
            self.mark_weight_update()
            self.weights = present
        return super().forward(x)


class Choosing(nn.Module):
    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.net, self.by = nn.Linear(ACTIONS, ACTIONS), by

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.by * self.net(x)
        return logits, nn.functional.one_hot(logits.argmax(-1), ACTIONS).float()


def restarting() -> TensorDictModule:
    return TensorDictModule(Restarting(), in_keys=["observation"], out_keys=["seen"])


def transformer() -> TensorDictModule:
    """TorchRL has it from 0.15 on."""
    return torchrl.modules.TransformerModule(
        OBSERVATIONS, ACTIONS, num_heads=1, max_seq_len=9, in_key="observation", out_key="seen"
    )


ATTENTIONS = [restarting] + [transformer] * hasattr(torchrl.modules, "TransformerModule")


def attentive(attention: Callable[[], nn.Module], by: float = 1.0) -> TensorDictSequential:
    torch.manual_seed(0)
    choosing = TensorDictModule(Choosing(by), in_keys=["seen"], out_keys=["logits", "action"])
    return TensorDictSequential(attention(), choosing)


def make_env_with_starts() -> EnvBase:
    return TransformedEnv(CountingEnv(horizon=7), InitTracker())


def attentive_collector(way: str, policy: nn.Module) -> BaseCollector:
    env = make_env_with_starts
    if way == "in process":
        return Collector(env, policy, frames_per_batch=10, total_frames=-1, track_policy_version=True)
    compiled = {"backend": "eager"} if way == "compiled" else None
    adopt = "alias" if compiled else way
    schemes = {"policy": BoardScheme(adopt)}
    return make_workers(
        MultiSyncCollector, policy, schemes=schemes, env=env, compile_policy=compiled, workers=1
    )


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("way", ["in process", "alias", "copy", "compiled"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.each_value
def test_what_an_attention_keeps_of_earlier_steps_acts_until_the_next_version_and_is_no_alarm(
    attention: Callable[[], nn.Module], way: str
) -> None:
    learner, published, batches = attentive(attention), {}, []
    with running(attentive_collector(way, attentive(attention))) as collector:
        trainer = make_dqn_trainer(collector, total_frames=6 * 10)
        trainer.attentive = learner
        sync = SyncWeights({"policy": "attentive"}, when=Every(2))
        sync.register(trainer)
        hook = VerifySync(sync, when=EACH, behaviour=EACH)
        hook.register(trainer)
        for stage in ("setup", "post_steps"):
            trainer.register_op(
                stage,
                lambda: published.setdefault(sync.version, copy.deepcopy(learner.state_dict())),
            )

        def learn(batch: TensorDictBase) -> None:
            batches.append(batch.clone())
            with torch.no_grad():
                for parameter in learner.parameters():
                    parameter.mul_(1.05)

        trainer.register_op("pre_steps_log", learn)
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None

    # Each frame is what the version computes that it names, with its keys and values alone.
    again, version = attentive(attention), None
    for frame in torch.cat([batch.reshape(-1) for batch in batches]):
        if version != int(frame["policy_version"]):
            version = int(frame["policy_version"])
            again.load_state_dict(published[version])
            outdate(keepers([again]))
        answer = again(frame.select("observation", "is_init").clone().unsqueeze(0))
        assert torch.equal(answer["logits"][0], frame["logits"])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_keys_and_values_hide_no_fault(attention: Callable[[], nn.Module]) -> None:
    with running(attentive_collector("in process", attentive(attention, by=2.0))) as collector:
        trainer = make_dqn_trainer(collector, total_frames=60)
        trainer.attentive = attentive(attention)
        sync = SyncWeights({"policy": "attentive"})
        sync.register(trainer)
        VerifySync(sync, when=EACH, behaviour=EACH).register(trainer)
        with pytest.raises(PublishError, match=r"'logits' that is [\d.]+ apart from"):
            trainer.train()


def test_a_memory_that_cannot_be_sent_is_said() -> None:
    with running(make_collector(actor_of(Remembering(deque(maxlen=2))))) as collector:
        with pytest.warns(OlderWeightsAct, match="something in policy"):
            trainer, hook = verified(collector, Remembering(deque(maxlen=2)), batches=6)
        trainer.train()
    assert hook.deviations == []
    assert any("remembers its calls in an object that cannot be sent" in why for why in hook.uncompared)


def test_weights_that_stand_still_are_no_proof() -> None:
    with running(make_collector(actor_of(make_mlp(ACTIONS)))) as collector:
        trainer, hook = verified(collector, make_mlp(ACTIONS), lr=0.0)
        trainer.train()
    assert hook.deviations == []
    assert hook.behaviour_held is None
    assert hook._report()["verify_sync/outputs_without_power"] == 1


@pytest.mark.processes
@pytest.mark.seconds
def test_power_is_shown_by_the_version_before_even_if_the_learner_stands_still() -> None:
    with asked_by_hand() as (publish, ask, hear):
        publish(0.0)
        for moves in (True, False):
            publish(0.5 * moves)
            ask()
            judged = hear()
            assert (judged.held, judged.powerless, judged.wrong) == (moves, ("policy",) * (not moves), ())


@pytest.mark.processes
@pytest.mark.seconds
def test_a_worker_that_begins_some_versions_later_is_compared_and_if_it_cannot_be_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with asked_by_hand() as (publish, ask, hear):
        for held in (1, 0):
            ask()
            for _ in range(6):
                publish(0.1)
            judged = hear()
            assert (judged.held, bool(judged.untold)) == (held, not held)
            monkeypatch.setattr("rlsync.sync.verification._IMAGE_BYTES", 0)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "by",
    [
        "nobody",  # its parts are not looked into all the same
        pytest.param("the collector", marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param("the user", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_compiled_policy_is_compared_as_a_whole(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for acts, learns in ((1.0, 1.0), (2.0, 1.0)):
        actor = actor_of(Scaled(acts))
        if by == "the user":
            collector = make_collector(torch.compile(actor, backend="eager"))
        elif by == "the collector":
            collector = make_collector(actor, compile_policy={"backend": "eager"})
        else:
            monkeypatch.setattr("rlsync.torchrl_plugin.compat.collectors.runs_compiled", lambda _: True)
            collector = make_collector(actor)
        with running(collector):
            trainer, hook = verified(collector, Scaled(learns))
            if acts == learns:
                trainer.train()
                assert (hook.deviations, hook.uncompared) == ([], ())
                assert hook.behaviour_held is not None
            else:
                with pytest.raises(PublishError, match="'logits' that is"):
                    trainer.train()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_a_policy_that_workers_compile_is_compared_as_a_whole() -> None:
    acting, scheme = actor_of(make_mlp(ACTIONS)), {"policy": BoardScheme()}
    compiled = {"backend": "eager"}
    made = make_workers(MultiSyncCollector, acting, schemes=scheme, workers=1, compile_policy=compiled)
    with running(made) as collector:
        trainer, hook = verified(collector, make_mlp(ACTIONS))
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None


@pytest.mark.processes
@pytest.mark.seconds
def test_a_run_of_workers_is_the_same_with_and_without_the_checks() -> None:
    # Its dropout may drop all that shows that a weight acts: that look is not what is tested.
    actor = {"policy": Source("loss_module.actor_network", idle=("*",))}
    runs = []
    for prove, behaviour in ((True, EACH), (False, None)):
        torch.manual_seed(0)
        with running(workers(Restless(), prove=prove)) as collector:
            collector.set_seed(0)
            trainer = make_trainer(collector, make_ppo_loss(actor_of(Restless())))
            sync, frames = SyncWeights(actor), []
            sync.register(trainer)
            hook = VerifySync(sync, when=EACH, behaviour=behaviour)
            hook.register(trainer)
            trainer.register_op("batch_process", lambda batch, frames=frames: frames.append(batch.clone()))
            trainer.train()
            runs.append([item for frame in frames for item in frame.exclude("collector").items(True, True)])
            runs[-1] += trainer.loss_module.named_parameters()
        assert bool(hook.uncompared) is (behaviour is not None)  # its outputs are random
    for (name, one), (_, other) in zip(*runs, strict=True):
        assert torch.equal(one, other), name


def test_a_part_of_the_policy_is_compared_by_itself_and_exploration_is_off() -> None:
    q = QValueActor(
        TensorDictModule(make_mlp(ACTIONS), ["observation"], ["action_value"]),
        in_keys=["observation"],
        spec=make_counting_env().action_spec,
    )
    greedy = EGreedyModule(make_counting_env().action_spec, eps_init=1.0, eps_end=1.0)
    loss = DQNLoss(q, action_space="one_hot", delay_value=True)
    with running(make_collector(TensorDictSequential(copy.deepcopy(q), greedy))) as collector:
        trainer = make_trainer(collector, loss)
        sync = SyncWeights({"policy.module[0]": "loss_module.value_network"})
        sync.register(trainer)
        hook = VerifySync(sync, when=EACH, behaviour=EACH)
        hook.register(trainer)
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())


def test_a_comparison_changes_no_frame() -> None:
    frames = []
    for behaviour in (None, EACH):
        torch.manual_seed(0)
        with running(make_collector(actor_of(Normed()))) as collector:
            trainer = make_trainer(collector, make_ppo_loss(actor_of(Normed())))
            sync = SyncWeights(ACTOR)
            sync.register(trainer)
            VerifySync(sync, when=EACH, behaviour=behaviour).register(trainer)
            seen: list[object] = []
            trainer.register_op("batch_process", lambda batch, seen=seen: seen.append(batch.clone()))
            trainer.train()
            frames.append((torch.stack(seen), list(collector.policy.buffers())))
    assert (frames[0][0] == frames[1][0]).all()
    assert all(torch.equal(a, b) for a, b in zip(frames[0][1], frames[1][1], strict=True))


@pytest.mark.parametrize("behaviour", [10, 1.0, 0.0, "always"])
def test_a_behaviour_that_is_neither_a_trigger_nor_a_share_is_refused(behaviour: object) -> None:
    with pytest.raises(ConfigError, match="'behaviour' is a trigger or a share of the time below 1"):
        VerifySync(SyncWeights(ACTOR), behaviour=behaviour)


@pytest.mark.seconds
def test_outputs_are_compared_unasked_as_often_as_the_share_of_the_time_allows() -> None:
    checks = {}
    for share in (0.999, 1e-6):
        with running(make_collector(actor_of(make_mlp(ACTIONS)))) as collector:
            trainer = make_trainer(collector, make_ppo_loss(actor_of(make_mlp(ACTIONS))), batches=200)
            sync = SyncWeights(ACTOR)
            sync.register(trainer)
            hook = VerifySync(sync, when=Every(1000), behaviour=share)
            hook.register(trainer)
            trainer.train()
        assert (hook.deviations, hook.uncompared) == ([], ())
        assert hook.behaviour_held is not None
        checks[share] = hook.checks
    assert checks[1e-6] == 1
    assert checks[0.999] > 1


@pytest.mark.seconds
@pytest.mark.parametrize("behaviour", [EACH, 0.5])
def test_without_memory_for_copies_digests_alone_are_compared_and_that_is_said(
    behaviour: Trigger | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 10)
    with running(make_collector(actor_of(make_mlp(ACTIONS)))) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(make_mlp(ACTIONS))), batches=6)
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
        hook = VerifySync(sync, when=EACH, behaviour=behaviour)
        hook.register(trainer)
        trainer.train()
        assert sync.bound.endpoint.publisher.sources == {}
    assert hook.checks > 1
    assert hook.deviations == []
    assert hook.behaviour_held is None
    assert hook.uncompared == ("outputs: it wants 0.0 GB of memory for a while, and 0.0 GB are free",)


@pytest.mark.processes
@pytest.mark.seconds
def test_a_plain_tensor_that_differs_is_named_unasked() -> None:
    with running(workers(Scaled(mean=0.0))) as collector:
        trainer = make_trainer(collector, make_ppo_loss(actor_of(Scaled(mean=1.0))), batches=6)
        sync = SyncWeights(ACTOR)
        sync.register(trainer)
        VerifySync(sync).register(trainer)
        with pytest.raises(PublishError, match="apart from what the learner's module computes"):
            trainer.train()
