"""The settings of a cluster: on which machines workers act."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes.bounds import above_zero, caught, one_of
from rlsync.workers.devices import device_of_each

if TYPE_CHECKING:
    from rlsync.recipes.config import Config

#: What ``cluster.kind`` says where all workers are on this machine.
THIS_MACHINE = "none"


@dataclass
class ClusterConfig:
    """The machines that workers act on: this one, or the nodes of a Ray cluster.

    ``address`` is ``HOST:PORT`` of a running cluster, or null for a Ray on this machine.
    ``workers_per_node`` is null where each node has ``collector.num_workers``. ``resources`` is what an agent
    takes of Ray's resources; nodes that have less get no workers. With ``keep_agents`` agents outlive a
    learner that was killed, and wait for the one that resumes its run.
    """

    kind: str = one_of(THIS_MACHINE, "ray")
    address: str | None = None
    workers_per_node: int | None = above_zero(None)
    resources: dict[str, Any] = field(default_factory=dict)
    placement: str = one_of("all", "others")
    min_nodes: int = above_zero(1)
    credits: int = above_zero(2)
    node_timeout_s: float = above_zero(30.0)
    start_timeout_s: float = above_zero(300.0)
    keep_agents: bool = False
    learner_timeout_s: float = above_zero(600.0)


def workers_on_a_node(config: Config) -> int:
    """How many workers each machine has.

    Example:
        >>> from rlsync.recipes.config import Config
        >>> workers_on_a_node(Config())
        2
    """
    return config.cluster.workers_per_node or config.collector.num_workers


def cluster_errors(config: Config) -> Iterator[RlsyncError]:
    """All that is wrong with the settings of a cluster. Connects to nothing."""
    cluster = config.cluster
    if cluster.kind == THIS_MACHINE:
        return
    from rlsync.workers.cluster.address import check_address

    yield from caught(lambda: check_address(cluster.address))
    if not config.recipe.acts_on_clusters():
        yield ConfigError(
            f"the recipe {config.recipe.name!r} cannot act on a cluster",
            f"cluster.kind={cluster.kind}",
            "give cluster=none, or a recipe whose workers never wait for the learner: impala or laser",
        )
    if cluster.placement == "others" and cluster.address is None:
        yield ConfigError(
            "a Ray that is started for this run has no other node than the learner's",
            "cluster.placement=others",
            "give cluster.address, or cluster.placement=all",
        )
    if cluster.keep_agents and cluster.address is None:
        yield ConfigError(
            "a Ray that is started for this run ends with its learner, and so do its agents",
            "cluster.keep_agents=true",
            "start a cluster (ray start --head) and give cluster.address, or cluster.keep_agents=false",
        )
    for name, amount in cluster.resources.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            yield ConfigError(
                f"{amount!r} is no amount of a resource", f"cluster.resources.{name}", "give a number > 0"
            )
    if not isinstance(config.collector.device, str):
        yield from caught(
            lambda: device_of_each(config.collector.device, workers_on_a_node(config), "collector.device")
        )
