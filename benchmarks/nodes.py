"""How old the weights of the slowest of many nodes are: the relay's own decisions in a simulated cluster.

    python benchmarks/nodes.py --limits limits.json [--nodes 10 100 1000] [--sizes 0.1 6.3] [--out nodes.csv]

The sender, the mailbox and the agents are those of ``rlsync.transport.relay``. Simulated are the time, Ray and
the network:

- **Calls.** The mailbox answers one after the other. What a version costs the mailbox and the learner's process
  for each node, a report, a put and a digest are measured: ``limits.json`` is what ``python
  benchmarks/ray_publish.py limits --out limits.json`` has written.
- **Who serves a pull**: as Ray has it (src/ray/object_manager: pull_manager.cc, push_manager.cc), one node at
  random of those that have the whole image when the pull begins, the learner's among them. After 10 s, then
  20 s and so on, it is asked of another one, too.
- **Links.** Each machine has one link in each direction. What a machine sends goes to all receivers at the
  same speed, in turn, chunk by chunk. A receiver that is slower than its share ends as late as its own link
  lets it; the others do not get what it leaves. Each message takes the latency on its way.

For each case, in a run of some versions after the first ones:

- **age_s**: the age of the weights of the slowest node: how long ago the version that it has was published,
  at the most, just before it gets the next one. It cannot be less than one over the wanted rate.
- **behind**: by how many published versions, at the most.
- **passed_per_s**: versions a second that the learner sent. Those between are skipped.
- **sent_by_learner**: bytes that leave the learner's machine for each of them, in images.
- **ends**: what is busy more than nine tenths of the time: the learner's link, the mailbox, the learner.

Of the case with which the relay was designed (6.3 MB, 10 versions a second) there are two more rows for each
cluster: ``all_at_once`` tells all nodes of a version at once, and lets each report whenever it has news; and with
waves, links of a hundredth of the nodes have a tenth of the speed, and a node dies every second.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import simpy
import torch
from simpy.events import Event

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.ray.mailbox_actor import LONG_POLL_S
from rlsync.transport.ray.receiver import pause_between_reports_s, report_again_s
from rlsync.transport.relay.ends import Agent, Sender
from rlsync.transport.relay.image import Image, ImageBuffer
from rlsync.transport.relay.mailbox import WAVE, Mailbox, Message, Request

LATENCY_S = 2e-4  #: of a message between two machines
RETRY_S = 10.0  #: Ray's object_manager_pull_timeout_ms
LOOK_S = 0.05  #: of a receiver at its board
SETTLE_VERSIONS = 2  #: of each node, before its age counts
BUSY = 0.9
DESIGNED_FOR = (6.3, 10.0)  #: MB, versions a second

LAYOUT = Layout.build({"policy": [LeafSpec("w", "parameter", (1,), torch.float32)]})


@dataclass(frozen=True, slots=True)
class Limits:
    """What Ray and the machine take for one node, or one megabyte, seconds."""

    ask_s: float  #: of the mailbox, for a version, without reports
    report_s: float  #: of the mailbox, for a report
    owner_s: float  #: of the learner's process, for a node that gets a version
    #: for each megabyte of an image of so many: a put and a digest, as the learner and each node need them
    copy_s: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, file: Path) -> Limits:
        """Those that ``ray_publish.py limits`` has measured."""
        measured = json.loads(file.read_text())
        report_ms = measured["calls"]["report_ms"]
        # Of each version it has heard two reports of a node, and those that are repeated meanwhile.
        reports = 2 + measured["seconds_each"] / report_again_s(0.0)
        copies = []
        for mb, each in sorted(measured["images_mb"].items(), key=lambda item: float(item[0])):
            copies.append((float(mb), (each["put_ms"] + each["digest_ms"]) / float(mb) / 1e3))
        return cls(
            ask_s=(measured["per_receiver"]["mailbox_cpu_ms"] - reports * report_ms) / 1e3,
            report_s=report_ms / 1e3,
            owner_s=measured["per_receiver"]["learner_cpu_ms"] / 1e3,
            copy_s=tuple(copies),
        )

    def image_s(self, mb: float) -> float:
        """For an image; of one that was not measured as for the next size that was."""
        sizes, each_s = zip(*self.copy_s, strict=True)
        return mb * float(np.interp(mb, sizes, each_s))


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster, one model."""

    nodes: int
    gbit: float  #: of each machine's link, each way
    model_mb: float
    wanted_per_s: float  #: versions a second that the learner publishes
    relay: str = "waves"
    slow_share: float = 0.0  #: of the nodes; their links have a tenth of the speed
    deaths_per_s: float = 0.0  #: of nodes; another one takes its place after a second
    seed: int = 0

    @property
    def image_bytes(self) -> float:
        return self.model_mb * 1e6

    @property
    def link_bytes_per_s(self) -> float:
        return self.gbit * 1e9 / 8


class Server:
    """Serves one after the other, in the order in which they come."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def serve(self, takes_s: float) -> Event:
        """An event at the end of the service."""
        self.busy_s += takes_s
        self._free_at_s = max(self._free_at_s, self._env.now) + takes_s
        return self._env.timeout(self._free_at_s - self._env.now)


class Link:
    """Sends to all receivers at the same speed, which together is that of the link."""

    def __init__(self, env: simpy.Environment, bytes_per_s: float) -> None:
        self._env = env
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0.0
        self._each_bytes = 0.0  # what a receiver that was there from the beginning would have got
        self._at_s = 0.0
        self._ends: list[
            tuple[float, int, Event]
        ] = []  # at which _each_bytes, and what happens then
        self._numbers = itertools.count()
        self._plans = 0

    def send(self, count: float) -> Event:
        """An event when so many bytes were sent to one receiver."""
        self._advance()
        sent = self._env.event()
        heapq.heappush(self._ends, (self._each_bytes + count, next(self._numbers), sent))
        self._plan()
        return sent

    def _advance(self) -> None:
        if self._ends:
            count = (self._env.now - self._at_s) * self.bytes_per_s
            self.sent_bytes += count
            self._each_bytes += count / len(self._ends)
        self._at_s = self._env.now

    def _plan(self) -> None:
        """Wait for the next end, unless something is sent before."""
        self._plans += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._each_bytes)
            plan = self._plans
            ends = self._env.timeout(left * len(self._ends) / self.bytes_per_s)
            ends.callbacks.append(lambda _: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plans:
            return  # something else was sent meanwhile
        self._advance()
        least = self._ends[0][0] + 1e-6
        while self._ends and self._ends[0][0] <= least:
            heapq.heappop(self._ends)[2].succeed()
        self._plan()


class Machine:
    """A machine's link, and whether it lives."""

    def __init__(self, env: simpy.Environment, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.link = Link(env, bytes_per_s)
        self.lives = True


@dataclass(eq=False)
class Stored:
    """An image in Ray's object store: its bytes, and the machines that have them all."""

    flat: torch.Tensor
    holders: list[Machine]


class Simulation:
    """One case, from the first version on."""

    def __init__(self, case: Case, limits: Limits) -> None:
        self.case = case
        self.limits = limits
        self.env = env = simpy.Environment()
        self.random = random.Random(case.seed)
        at_once = case.relay == "all_at_once"
        self.box = Mailbox(wave=10**9 if at_once else WAVE)
        self.reports_pause_s = 0.0 if at_once else pause_between_reports_s(case.nodes)
        self.mailbox = Server(env)
        self.owner = Server(env)
        self.learner = Machine(env, "learner", case.link_bytes_per_s)
        self.asking: dict[str, Event] = {}
        self.published_at_s: list[float] = []  # of each version, from 1
        self.sent = 0
        self.flats: dict[int, torch.Tensor] = {}
        self.sender = Sender(self._put, lambda _: None, self._post)
        self._posted: Event | None = None
        self._wake = env.event()
        self.nodes: list[Node] = []
        env.process(self._publish())
        env.process(self._send())
        for number in range(case.nodes):
            self._join(f"node {number}")
        if case.deaths_per_s:
            env.process(self._kill())

    # ------------------------------------------------------------------ the learner

    def _publish(self) -> Iterator[Event]:
        while True:
            self.published_at_s.append(self.env.now)
            if not self._wake.triggered:
                self._wake.succeed()
            yield self.env.timeout(1 / self.case.wanted_per_s)

    def _send(self) -> Iterator[Event]:
        """What the thread does that sends images: see SenderThread."""
        env = self.env
        image_s = self.limits.image_s(self.case.model_mb)
        while True:
            if len(self.published_at_s) == self.sender.stamp.version:
                self._wake = env.event()
                yield self._wake | env.timeout(self.sender.repeat_s)
            waves = self.case.relay == "waves"
            while (
                waves
                and self.sender.spreading
                and len(self.published_at_s) > self.sender.stamp.version
            ):
                self.sender.post_again(env.now)
                yield from self._await_reply()
                if self.sender.spreading:
                    yield env.timeout(0.02)
            newest = len(self.published_at_s)
            if newest > self.sender.stamp.version:
                yield env.timeout(image_s)
                buffer = ImageBuffer(LAYOUT)
                buffer.write(Stamp(1, newest), [torch.tensor([float(newest)])])
                self.sender.send(buffer.stamp, buffer.sealed(), env.now)
                self.sent += 1
            else:
                self.sender.repeat(env.now)
            yield from self._await_reply()

    def _put(self, flat: torch.Tensor) -> Stored:
        return Stored(flat, [self.learner])

    def _post(self, message: Message) -> None:
        self._posted = self.env.process(self._posting(message))

    def _posting(self, message: Message) -> Iterator[Event]:
        yield self.mailbox.serve(self.limits.report_s)
        reply = self.box.post(message, self.env.now)
        self._wake_next()
        self.sender.replied(message, reply)

    def _await_reply(self) -> Iterator[Event]:
        if self._posted is not None:
            yield self._posted
            self._posted = None

    # ------------------------------------------------------------------ the mailbox

    def ask(self, request: Request) -> Iterator[Event]:
        """What the mailbox's actor does; the process returns its answer."""
        env = self.env
        yield env.timeout(LATENCY_S)
        yield self.mailbox.serve(self.limits.ask_s / 2)
        until_s = env.now + LONG_POLL_S
        while True:
            message = self.box.ask(request, env.now)
            self._wake_next()
            if message is not None or env.now >= until_s:
                break
            news = self.asking[request.node] = env.event()
            yield news | env.timeout(until_s - env.now)
            if self.asking.get(request.node) is news:
                del self.asking[request.node]
        yield self.mailbox.serve(self.limits.ask_s / 2)
        yield env.timeout(LATENCY_S)
        return message

    def _wake_next(self) -> None:
        for node in self.box.next_told(self.asking, self.env.now):
            _wake(self.asking[node])

    # ------------------------------------------------------------------ the nodes

    def _join(self, name: str) -> None:
        speed = self.case.link_bytes_per_s
        if self.random.random() < self.case.slow_share:
            speed /= 10
        node = Node(self, Machine(self.env, name, speed))
        self.nodes.append(node)
        self.env.process(node.run())
        self.env.process(node.report())

    def _kill(self) -> Iterator[Event]:
        while True:
            yield self.env.timeout(self.random.expovariate(self.case.deaths_per_s))
            dies = self.random.choice([node for node in self.nodes if node.machine.lives])
            dies.machine.lives = False
            yield self.env.timeout(1.0)
            self._join(f"{dies.machine.name}'")

    def pull(self, machine: Machine, stored: Stored) -> Iterator[Event]:
        """Bring an image to a machine as Ray does."""
        env = self.env
        yield self.owner.serve(self.limits.owner_s)
        yield env.timeout(2 * LATENCY_S)  # the owner says who has it
        arrived = env.event()
        retry_s = RETRY_S
        while not arrived.triggered:
            holder = self.random.choice([each for each in stored.holders if each is not machine])
            env.process(self._transfer(holder, machine, arrived))
            yield arrived | env.timeout(retry_s)
            retry_s *= 2
        stored.holders.append(machine)

    def _transfer(self, holder: Machine, machine: Machine, arrived: Event) -> Iterator[Event]:
        env = self.env
        yield env.timeout(LATENCY_S)
        began_s = env.now
        yield holder.link.send(self.case.image_bytes)
        own_s = self.case.image_bytes / machine.link.bytes_per_s
        yield env.timeout(max(0.0, began_s + own_s - env.now) + LATENCY_S)
        if holder.lives and not arrived.triggered:
            arrived.succeed()

    # ------------------------------------------------------------------ what comes of it

    def run(self, versions: int, least_s: float, most_s: float) -> dict[str, Any]:
        """Run until each node has had so many versions, for ``least_s`` at least and ``most_s`` at most."""
        began: tuple[float, ...] | None = None
        while self.env.now < most_s:
            self.env.run(until=self.env.now + 0.5)
            living = [node for node in self.nodes if node.machine.lives]
            fewest = min(len(node.got) for node in living)
            if began is None and fewest >= SETTLE_VERSIONS:
                began = (self.env.now, self.sent, *self._spent())
            if began is not None and self.env.now >= began[0] + least_s and fewest >= versions:
                break
        if began is None:  # the slowest node got less than two versions
            began = (0.0, 0, 0.0, 0.0, 0.0)
        return self._row(*began)

    def _spent(self) -> tuple[float, float, float]:
        return self.learner.link.sent_bytes, self.mailbox.busy_s, self.owner.busy_s

    def _row(
        self, began_s: float, sent: int, sent_bytes: float, mailbox_s: float, owner_s: float
    ) -> dict[str, Any]:
        took_s = self.env.now - began_s
        now_bytes, now_mailbox_s, now_owner_s = self._spent()
        busy = {
            "link": (now_bytes - sent_bytes) / self.learner.link.bytes_per_s / took_s,
            "mailbox": (now_mailbox_s - mailbox_s) / took_s,
            "learner": (now_owner_s - owner_s) / took_s,
        }
        age_s, behind = self._oldest(began_s)
        passed = max(1, self.sent - sent)
        return {
            **asdict(self.case),
            "age_s": round(age_s, 3),
            "behind": behind,
            "passed_per_s": round((self.sent - sent) / took_s, 3),
            "sent_by_learner": round((now_bytes - sent_bytes) / self.case.image_bytes / passed, 2),
            **{f"{name}_busy": round(share, 3) for name, share in busy.items()},
            "ends": " ".join(name for name, share in busy.items() if share > BUSY),
        }

    def _oldest(self, began_s: float) -> tuple[float, int]:
        """The greatest age of what a node had, from ``began_s`` on, and how many versions it was behind."""
        oldest_s, behind = 0.0, 0
        for node in self.nodes:
            ends = [at_s for at_s, _ in node.got[1:]] + [self.env.now]
            for (_, version), until_s in zip(node.got, ends, strict=False):
                if until_s >= began_s and (node.machine.lives or until_s < self.env.now):
                    age_s = until_s - self.published_at_s[version - 1]
                    if age_s > oldest_s:
                        oldest_s = age_s
                        behind = int(until_s * self.case.wanted_per_s + 1e-9) + 1 - version
        return oldest_s, behind


class Node:
    """What a node's receiver does: see NodeReceiver."""

    def __init__(self, simulation: Simulation, machine: Machine) -> None:
        self.simulation = simulation
        self.machine = machine
        self.agent = Agent(machine.name, self._published, 2 * LONG_POLL_S)
        self.got: list[tuple[float, int]] = []  # when which version came
        self._news = simulation.env.event()

    def run(self) -> Iterator[Event]:
        there = self.simulation
        env = there.env
        yield env.timeout(there.random.uniform(0.0, 0.1))
        while self.machine.lives:
            request = self.agent.request(env.now)
            if request is None:
                yield env.timeout(LOOK_S)
                continue
            message = self.agent.to_pull((yield env.process(there.ask(request))), env.now)
            if message is None or not self.machine.lives:
                continue
            yield env.process(there.pull(self.machine, message.address))
            yield env.timeout(there.limits.image_s(there.case.model_mb))
            if self.machine.lives:
                self.agent.arrived(message, message.address.flat, env.now)

    def report(self) -> Iterator[Event]:
        """Tell the mailbox of what is on the board, and a look later of what the worker has adopted."""
        there = self.simulation
        env = there.env
        while self.machine.lives:
            pause_s = max(LOOK_S, there.reports_pause_s)
            again = env.timeout(report_again_s(there.reports_pause_s))
            yield self._news | again
            self._news = env.event()
            for _ in range(2):
                yield there.mailbox.serve(there.limits.report_s)
                yield env.timeout(pause_s)
                if there.reports_pause_s > LOOK_S:
                    break  # both are told at once

    def _published(self, image: Image) -> None:
        self.got.append((self.simulation.env.now, image.stamp.version))
        _wake(self._news)


def _wake(event: Event) -> None:
    if not event.triggered:
        event.succeed()


def simulated(case: Case, limits: Limits) -> dict[str, Any]:
    """The row of one case."""
    torch.set_num_threads(1)
    return Simulation(case, limits).run(versions=5, least_s=5.0, most_s=600.0)


def table(rows: list[dict[str, Any]]) -> str:
    """For each cluster and each speed of links: age, images that the learner's machine sends, and what ends it."""
    speeds = sorted({row["gbit"] for row in rows})
    lines = [
        "| model | nodes | wanted a second | relay | "
        + " | ".join(f"{gbit:g} Gbit/s" for gbit in speeds)
        + " |",
        "|---:|---:|---:|---|" + "---|" * len(speeds),
    ]
    cells: dict[tuple[Any, ...], dict[float, str]] = {}
    for row in rows:
        relay = row["relay"].replace("_", " ")
        if row["slow_share"]:
            relay += ", with faults"
        key = (row["model_mb"], row["nodes"], row["wanted_per_s"], relay)
        cell = f"{row['age_s']:,.3g} s, {row['sent_by_learner']:.1f} images"
        if row["ends"]:
            cell += f" ({row['ends']})"
        cells.setdefault(key, {})[row["gbit"]] = cell
    for (model_mb, nodes, wanted, relay), by_speed in sorted(cells.items()):
        start = f"| {model_mb:g} MB | {nodes:,} | {wanted:g} | {relay} | "
        lines.append(start + " | ".join(by_speed[gbit] for gbit in speeds) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limits", type=Path, required=True)
    parser.add_argument("--nodes", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--gbits", nargs="+", type=float, default=[1, 10, 100])
    parser.add_argument(
        "--sizes", nargs="+", type=float, default=[0.1, 1, 6.3, 64, 1024], help="MB"
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1, 10, 100], help="versions a second"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    limits = Limits.of(options.limits)
    cases = []
    for each in itertools.product(options.nodes, options.gbits, options.sizes, options.rates):
        case = Case(*each)
        cases.append(case)
        if (case.model_mb, case.wanted_per_s) == DESIGNED_FOR:
            cases.append(replace(case, relay="all_at_once"))
            cases.append(replace(case, slow_share=0.01, deaths_per_s=1.0))
    rows = []
    with Pool(options.processes) as pool:
        for row in pool.imap(partial(simulated, limits=limits), cases):
            rows.append(row)
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if options.table is not None:
        options.table.write_text(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
