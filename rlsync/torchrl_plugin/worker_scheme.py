"""WorkerScheme: what the schemes have in common by which the workers of a collector adopt by themselves."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update import WeightSyncScheme

from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.path import parse
from rlsync.core.plan import POLICY
from rlsync.core.user_input import check_choice
from rlsync.sync.adopter import Adopt
from rlsync.sync.starting import StartLogs
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.torchrl_plugin.compat import schemes, stamps
from rlsync.torchrl_plugin.ending.waits import await_newest
from rlsync.torchrl_plugin.served import Served, ServedServer
from rlsync.torchrl_plugin.worker import AdoptAt, ServerSync, WorkerSync

ONE_VERSION = "a board has one newest version for all workers"
OWN_COLLECTORS = "leave it out, or give workers of their own kind a collector of their own"


class Link:
    """What the schemes of one collector share, also when they are pickled: a publisher or an adopter."""

    def __init__(self, publisher: WorkersPublisher) -> None:
        self.publisher: WorkersPublisher | None = publisher
        self.handle = publisher.transport.handle
        self.worker: WorkerSync | None = None
        self.server: ServerSync | None = None
        self.served: ServedServer | None = None
        self.starting: StartLogs | None = None  #: of the workers, until they stand
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # A transport's handle tells its newest version, so that an actor knows what to wait for.
        if self.publisher is None:
            handle = self.handle
        else:
            handle = self.publisher.transport.handle
        return {**dict.fromkeys(vars(self)), "handle": handle}

    def in_worker(self, worker_idx: int) -> WorkerSync:
        """The one adopter of this process."""
        if self.worker is None or self.worker.worker_idx != worker_idx:
            self.worker = WorkerSync(self.handle, worker_idx)
            self.publisher = None  # a forked process inherits the learner's
        return self.worker

    def leave(self, destination: str | None) -> None:
        """In a worker: take no more weights for ``destination``. The last one gives the reader back."""
        if self.worker is not None and self.worker.leave(destination):
            self.worker = None

    def in_server(self, destination: str, adopt: Adopt, server: InferenceServer) -> None:
        """Make the one adopter of an inference server, in the learner's process or in its own."""
        beside_learner = self._pid == os.getpid()
        if not beside_learner:
            # a forked process inherits the learner's
            self.publisher = None
            self.served = None
        self.server = ServerSync(
            self.handle, destination, adopt, server, beside_learner=beside_learner
        )

    def serve(self, holder: object, scheme: object) -> ServedServer:
        """Serve an inference server, ``holder`` or its own; ConfigError, PublishError if that cannot be."""
        if self.served is not None and self.served.serves(holder):
            return self.served
        served = ServedServer(holder, scheme)
        if self.publisher is not None:
            self.publisher.serve(served, served.destination)
            self.publisher.leaves_at = served.expected
        self.served = served
        return served


class WorkerScheme(WeightSyncScheme):
    """A scheme whose workers adopt in the thread that acts; on Ray it has no link before a collector."""

    link: Link | None

    #: What TorchRL 0.15 asks a scheme: whether a send waits until all workers have applied it. Then it counts
    #: a version for each destination; the ledger has counted already.
    sync = False

    def __init__(self, adopt: Adopt, adopt_at: AdoptAt, *, prove: bool = True) -> None:
        who = type(self).__name__
        check_choice("adoption mode", adopt, get_args(Adopt), f"{who}(adopt={adopt!r})")
        check_choice(
            "moment of adoption", adopt_at, get_args(AdoptAt), f"{who}(adopt_at={adopt_at!r})"
        )
        super().__init__(strategy="tensordict")
        self.prove = prove
        self.adopt: Adopt = adopt
        self.adopt_at: AdoptAt = adopt_at
        self._pid = os.getpid()

    def _serve(self, collector: object, model_id: str) -> Served:
        """How this scheme serves a collector; ConfigError if it cannot. Makes the link."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Called for the first destination of a collector, before its workers start."""

    def _init_on_sender_impl(
        self,
        model_id: str = POLICY,
        context: object = None,
        *,
        model: object = None,
        ctx: object = None,
        num_workers: int | None = None,
        remote_collectors: object = None,
        **placed: object,
    ) -> None:
        """TorchRL's interface. Collectors pass all of these, and ``model`` beside their ``context``."""
        _check_interface(context, placed, model, of=type(self).__name__)
        _refuse_other_moments(context)
        parse(model_id)
        served = self._serve(context, model_id)
        self.model_id = model_id
        self.context = context

        # What concerns the whole collector is done for the first of its destinations.
        publisher = self.publisher
        if publisher.serve(served.workers, model_id):
            self._prepare()
            schemes.around_updates(context, lambda to, _: publisher.one_publish(to))
            here = weakref.ref(context)
            publisher.announce = lambda version: stamps.announce_version(here(), version)
            stamps.keep_announced(context, lambda: publisher.version, publisher.acting_versions)
            from rlsync.torchrl_plugin.hooks import misuse  # here, because workers need no trainers

            problem = "nothing publishes to the workers of this collector, which act with their first weights"
            misuse.notice_silence(context, problem, lambda: publisher.version)

        # Workers that get their policy from the learner find its weights on the board.
        if model_id == POLICY:
            policy = served.policy()
            if policy is not None:
                publisher.publish_modules({POLICY: policy}, "the collector")

    def connect(self, *, worker_idx: int | None = None, weights: object = None) -> None:
        """Connect a destination of a collector, as TorchRL does for each.

        Args:
            worker_idx: in a worker, its number.
            weights: on the learner's side, what to publish first; ``None``: nothing.

        Raises:
            ConfigError: this is the second destination or collector.
        """
        if self.synchronized_on_sender:
            raise ConfigError(
                f"this {type(self).__name__} was given twice, and serves one destination of one collector",
                f"weight_sync_schemes={{{self.model_id!r}: ...}}",
                "make one for each collector, or take board.scheme() of one WeightBoard for each destination",
            )
        super().connect(worker_idx=worker_idx, weights=weights)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process is the learner. A forked worker inherits the learner's scheme as it is."""
        return super().initialized_on_sender and self._pid == os.getpid()

    @property
    def publisher(self) -> WorkersPublisher:
        """The learner's side.

        Raises:
            PublishError: in a worker, or before there is a collector.
        """
        if self.link is None or self.link.publisher is None:
            problem = "a worker does not publish"
            where = type(self).__name__
            raise PublishError(problem, where, "publish from the learner")
        return self.link.publisher

    def create_transport(self, **_: object) -> WorkersPublisher:
        """The learner's end, the transport of all workers.

        Raises:
            PublishError: in a worker.
        """
        return self.publisher

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: object = None
    ) -> None:
        if weights is not None:
            self.send(weights)

    def _init_on_receiver_impl(
        self, model_id: str, context: object = None, worker_idx: int = 0, model: object = None
    ) -> None:
        """Begin in a worker; a model that came without its memory gets the newest weights."""
        assert self.link is not None
        self.model_id = model_id
        stamps.make_room_for_the_stamp()
        self.worker_idx = worker_idx
        worker = self.link.in_worker(worker_idx)
        worker.declare(model_id, self.adopt, self.adopt_at, prove=self.prove)
        if model is not None:
            weights = schemes.weights_of(model)
            if isinstance(weights, nn.Module):
                worker.prepare(model_id, weights)
        if context is not None:
            self.context = context

    @property
    def context(self) -> Any:
        """The collector, once it exists."""
        return super().context

    @context.setter
    def context(self, collector: Any) -> None:
        schemes.set_context(self, collector)
        if self.initialized_on_receiver and collector is not None and self.link is not None:
            worker = self.link.in_worker(self.worker_idx)
            worker.attach(collector)
            # TorchRL refuses a worker whose policy is None
            self.model = worker.module(self.model_id)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        """Nothing: the worker adopts by itself when it next collects."""

    def send(self, weights: object = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish ``weights`` for this destination; returns without waiting for any worker.

        Args:
            weights: a module, a tensordict, a dict of tensors; ``None`` for the learner's own weights.
            worker_ids: must be ``None`` or name all workers.

        Raises:
            LayoutMismatch: the weights do not fit the leaves in the workers.
            PublishError: ``worker_ids`` leaves out a worker: a board has one newest version for all.
        """
        if self.model_id is None:
            name = type(self).__name__
            raise PublishError("this scheme has no collector yet", f"{name}.send", "pass it to one")
        _refuse_some_workers(worker_ids, weights, self.publisher.collector.num_workers)
        self.publisher.send(self.model_id, weights)

    def receive(self, timeout: float | None = None) -> None:
        """Adopt, in an inference server, between two batches. Workers adopt by themselves, between rollouts.

        Args:
            timeout: not used: nobody waits.
        """
        if self.link is not None and self.link.server is not None:
            self.link.server.between_batches()

    def wait(self, timeout_s: float) -> None:
        """Wait until what reads the board acts with the newest version.

        Args:
            timeout_s: give up after this many seconds.

        Raises:
            WorkerLost: a worker, or the process of the inference server, is dead.
            AdoptionTimeout: the deadline passed.
        """
        await_newest(self.publisher, timeout_s)


def _check_interface(
    context: object, placed: Mapping[str, object], model: object, *, of: str
) -> None:
    """Refuse (ConfigError) weights without a collector, or ``placed`` in workers one by one."""
    refused = dict(placed)
    if context is None:
        refused["model"] = model
    arguments = [f"{name}=..." for name, value in refused.items() if value is not None]
    if arguments or context is None:
        problem = "a board serves the workers of a collector, all with the same weights"
        cure = f"pass the scheme to a process collector, weight_sync_schemes={{'policy': {of}()}}, which "
        cure += "calls this method"
        raise ConfigError(problem, f"{of}.init_on_sender({', '.join(arguments)})", cure)


def _refuse_other_moments(collector: object) -> None:
    """Refuse (ConfigError) a collector whose schemes of ours adopt at different times."""
    moments: dict[str, AdoptAt] = {}
    for name, scheme in schemes.schemes_of(collector).items():
        if isinstance(scheme, WorkerScheme):
            moments[name] = scheme.adopt_at
    if len(set(moments.values())) > 1:
        problem = "the destinations of this collector are adopted at different times"
        where = ", ".join(f"{name!r}: adopt_at={moment!r}" for name, moment in moments.items())
        raise ConfigError(problem, where, "give all schemes of a collector the same adopt_at")


def _refuse_some_workers(
    worker_ids: int | list[int] | None, weights: object, num_workers: int
) -> None:
    """Refuse (PublishError) ``worker_ids``, or a mapping by worker, that is not for all workers alike."""
    if isinstance(weights, dict):
        numbers = sorted(key for key in weights if isinstance(key, int))
        if numbers:
            where = f"update_policy_weights_ with weights for workers {numbers}"
            raise PublishError(ONE_VERSION, where, OWN_COLLECTORS)
    if worker_ids is None:
        return
    if isinstance(worker_ids, int):
        asked = {worker_ids}
    else:
        asked = set(worker_ids)
    workers = set(range(num_workers))
    if asked != workers:
        problem = f"a board publishes to all workers, not to {sorted(asked, key=str)} alone"
        where = f"update_policy_weights_(worker_ids={worker_ids!r}), workers {sorted(workers)}"
        cure = "leave worker_ids out, or give workers of their own kind a collector of their own"
        raise PublishError(problem, where, cure)
