"""The table of TorchRL's collectors and trainers in docs/compatibility.md says what happens."""

from __future__ import annotations

import pytest
import torchrl.collectors
import torchrl.collectors.distributed
import torchrl.trainers.algorithms
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from tests.tools.table.page import HEADS, ROWS, documented
from tests.tools.table.row import Row

#: Two that are abstract, and an LLMCollector that is an actor of Ray, which needs vLLM.
NOT_COLLECTORS = {"BaseCollector", "MultiCollector", "RayLLMCollector"}
#: What `make test` observes: the laws behind the other rows have tests of their own.
FEW = [next((row for row in ROWS if row.table == table), None) for table in HEADS]


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.usefixtures("fork_workers", "same_rendezvous")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row in FEW else pytest.mark.thorough) for row in ROWS],
    ids=lambda row: " ".join(row.name),
)
def test_each_cell_of_the_table_is_what_happens(row: Row, subtests: pytest.Subtests) -> None:
    said, seen = documented(row), row.observe()
    for column in HEADS[row.table][len(row.name) :]:
        with subtests.test(column):
            assert said.get(column) == seen.get(column, "")


def test_the_table_has_every_collector_of_torchrl() -> None:
    homes = (torchrl.collectors, torchrl.collectors.distributed, torchrl.collectors.llm)
    kinds = {name for home in homes for name in home.__all__ if is_a(getattr(home, name), BaseCollector)}
    assert kinds - NOT_COLLECTORS == {row.name[0].split("`")[1] for row in ROWS if row.table == "collectors"}


def test_the_table_has_every_trainer_of_torchrl() -> None:
    home = torchrl.trainers.algorithms
    kinds = {name for name in vars(home) if is_a(getattr(home, name), Trainer)} | {"Trainer"}
    kinds -= {"OnPolicyTrainer"}  # the base of three others
    names = [row.name[0].strip("`") for row in ROWS if row.table in ("trainers", "next trainers")]
    assert kinds == {name.partition(".")[0] for name in names}


def is_a(thing: object, kind: type) -> bool:
    return isinstance(thing, type) and issubclass(thing, kind)
