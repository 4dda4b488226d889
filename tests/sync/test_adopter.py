"""What acts in a worker follows the board: where it stands, when it was replaced, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rlsync.sync.adopter import Adopt, Adopter, Destination
from rlsync.sync.publisher import Publisher
from rlsync.sync.verification import WorkerAnswer
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.transport.board import format as fmt
from rlsync.transport.contract import Note
from tests.tools.counted_board import CountedBoard

both_ways = pytest.mark.parametrize("adopt", ["alias", "copy"])


class Counting(nn.Module):
    """A layer whose buffer counts how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def publish(board: CountedBoard, number: float, *destinations: str) -> dict[str, torch.Tensor]:
    """One version, every element ``number``, of a Counting at each destination; by name."""
    names = destinations or ("policy",)
    if board.layout is None:
        board.lay_out(Layout.build(dict.fromkeys(names, Leaves(Counting(), "learner").specs())))
    made = {name: torch.full_like(t, number) for name, t in Counting().state_dict().items()}
    board.publish([made[entry.leaf.name] for entry in board.layout.owned])
    return made


def weight(module: Counting) -> float:
    return module.layer.weight[0, 0].item()


@pytest.fixture
def board() -> Iterator[CountedBoard]:
    board = CountedBoard()
    yield board
    board.close()


@pytest.fixture
def adopter(board: CountedBoard) -> Iterator[Adopter]:
    adopter = Adopter(board.handle, 0)
    yield adopter
    adopter.close()


@both_ways
def test_each_version_acts_and_what_forward_changes_is_copied_out(
    board: CountedBoard, adopter: Adopter, adopt: Adopt
) -> None:
    module = Counting()
    pointer = module.layer.weight.data_ptr()
    adopter.place({"policy": Destination(lambda: module, adopt)})
    for version in (1, 2, 3):
        publish(board, version)
        assert adopter.adopt() == adopter.reader.version == version
        module(torch.ones(1, 2))
        assert weight(module) == version
        assert module.calls.tolist() == [version + 1.0] * 3
    assert (module.layer.weight.data_ptr() == pointer) is (adopt == "copy")


class Kept(Counting):
    """Keeps its weight as it was, until another address or another write is seen, or it is told."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.kept_for, self.kept, self.told = key, None, None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        key = {"address": weight.data_ptr(), "writes": weight._version, "told": self.told}[self.key]
        if self.kept_for != key:
            self.kept, self.kept_for = weight.detach().clone(), key
        return self.kept

    def mark_weight_update(self) -> None:
        self.told += 1
        if self.key == "address":
            self.kept_for = None


@both_ways
@pytest.mark.parametrize("key", ["address", "writes", "told"])
def test_what_a_module_keeps_of_its_weights_does_not_outlive_them(
    board: CountedBoard, adopter: Adopter, adopt: Adopt, key: str
) -> None:
    module = Kept(key)
    adopter.place({"policy": Destination(lambda: module, adopt)})
    addresses = []
    for version in (1, 2, 3):
        publish(board, version)
        adopter.adopt()
        addresses.append(module.layer.weight.data_ptr())
        if version != 2:  # no call, and the memory of version 1 comes back
            assert module(torch.ones(1, 2))[0, 0] == version
    assert addresses[0] == addresses[2]
    assert module.told == 3
    adopter.adopt()
    assert module.told == 3, "nothing was adopted"


def test_the_policy_around_a_destination_is_told_of_new_weights(
    board: CountedBoard, adopter: Adopter
) -> None:
    module = Counting()
    policy = Kept("told")
    policy.inner = module
    adopter.place({"policy": Destination(lambda: module)}, lambda: policy)
    publish(board, 1)
    adopter.adopt()
    assert policy.told == 1


def test_only_destinations_that_stand_here_are_taken_and_later_ones_from_then_on(
    board: CountedBoard, adopter: Adopter
) -> None:
    here, later = Counting(), Counting()
    untouched = weight(later)
    publish(board, 1, "policy", "net")
    adopter.place({"policy": Destination(lambda: here)})
    adopter.adopt()
    assert (weight(here), weight(later)) == (1, untouched)
    adopter.place({"policy": Destination(lambda: here), "net": Destination(lambda: later)})
    adopter.adopt()
    assert (weight(here), weight(later)) == (1, 1)


@both_ways
def test_a_module_that_was_replaced_gets_the_version_that_acts(
    board: CountedBoard, adopter: Adopter, adopt: Adopt
) -> None:
    stands = {"policy": Counting()}
    before = stands["policy"]
    adopter.place({"policy": Destination(lambda: stands["policy"], adopt)})
    publish(board, 1)
    adopter.adopt()
    stands["policy"] = Counting()
    assert adopter.adopt() == 1
    assert weight(stands["policy"]) == 1
    with torch.no_grad():
        before.layer.weight.fill_(7)  # its own memory again
    publish(board, 2)
    adopter.adopt()
    assert (weight(stands["policy"]), weight(before)) == (2, 7)


@both_ways
def test_a_buffer_that_was_replaced_in_the_module_is_written_from_then_on(
    board: CountedBoard, adopter: Adopter, adopt: Adopt
) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module, adopt)})
    publish(board, 1)
    adopter.adopt()
    module.calls = torch.full((3,), 9.0)
    publish(board, 2)
    adopter.adopt()
    assert module.calls.tolist() == [2.0] * 3


def test_a_state_dict_may_be_loaded_into_what_was_pointed_at_the_board(
    board: CountedBoard, adopter: Adopter
) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module)})
    publish(board, 1)
    adopter.adopt()
    module.load_state_dict(Counting().state_dict())
    assert adopter.adopt() == 1
    assert weight(module) == 1


@both_ways
def test_a_leaf_that_publishes_bring_no_more_keeps_its_value(
    board: CountedBoard, adopter: Adopter, adopt: Adopt
) -> None:
    """What it was pointed at is given back to the host, and would read as zeros."""
    module, publisher = Counting(), Publisher(board)
    adopter.place({"policy": Destination(lambda: module, adopt)})
    sent = {("policy", "layer.weight"): torch.ones(1, 2), ("policy", "layer.bias"): torch.ones(1)}
    publisher.publish(sent)
    adopter.adopt()
    del sent["policy", "layer.bias"]
    for number in (2.0, 3.0):
        sent["policy", "layer.weight"].fill_(number)
        publisher.publish(sent)
        adopter.adopt()
        assert (weight(module), module.layer.bias.item()) == (number, 1.0)


def test_a_leaf_that_publishes_bring_no_more_is_the_workers_own(
    board: CountedBoard, adopter: Adopter
) -> None:
    module, publisher = Counting(), Publisher(board)
    adopter.place({"policy": Destination(lambda: module)})
    sent = {("policy", "layer.weight"): torch.ones(1, 2), ("policy", "calls"): torch.ones(3)}
    publisher.publish(sent)
    adopter.adopt()
    del sent["policy", "calls"]
    publisher.publish(sent)
    adopter.adopt()
    module.calls.fill_(7)
    publisher.publish(sent | {("net", "w"): torch.ones(1)})  # laid out anew, with the value of before
    assert adopter.adopt() == 3
    assert module.calls.tolist() == [7.0] * 3


def test_a_worker_has_settled_when_a_rollout_would_adopt_and_answer_nothing(
    board: CountedBoard, adopter: Adopter
) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module)})
    publish(board, 1)
    assert not adopter.settled()
    with adopter.acting():
        pass
    assert adopter.settled()
    board.ask()
    assert not adopter.settled(), "a question is open"
    with adopter.acting():
        pass
    assert adopter.settled()
    heartbeat = fmt.reader_line(0) + fmt.READER_HEARTBEAT_NS
    board._words[heartbeat] = 0
    assert adopter.settled()
    assert board._words[heartbeat], "the learner sees that this worker lives"
    module.load_state_dict(Counting().state_dict())
    assert not adopter.settled(), "the module does not hold what was published"


def answer_of(board: CountedBoard) -> WorkerAnswer:
    note = board.note(0, Note.ANSWER)
    assert note is not None
    return WorkerAnswer.from_json(note)


@pytest.mark.parametrize("early", [False, True])
def test_a_question_is_answered_once_with_what_arrived_and_what_acted(
    board: CountedBoard, adopter: Adopter, early: bool
) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module)})
    published = publish(board, 1)
    if early:
        adopter.adopt()
    question = board.ask()
    with adopter.acting() as version:
        module(torch.ones(1, 2))
    parameters = digest([published["layer.weight"], published["layer.bias"]])
    answer = answer_of(board)
    arrived = {"policy": digest([published["calls"]])}
    assert answer == WorkerAnswer(question, version, {"policy": parameters}, arrived, answer.spent_s)
    board.ask()
    with adopter.acting():
        pass
    again = answer_of(board)
    assert again.asked > question
    assert (again.kept, again.arrived) == (answer.kept, {}), "it did not adopt for this rollout"


def test_weights_that_were_changed_in_the_rollout_are_told(board: CountedBoard, adopter: Adopter) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module, "copy")})
    published = publish(board, 1)
    board.ask()
    with adopter.acting(), torch.no_grad():
        module.layer.bias.add_(1)
    said = answer_of(board).kept["policy"]
    assert said == digest([published["layer.weight"], published["layer.bias"] + 1])


def test_a_rollout_that_fails_is_not_answered_for(board: CountedBoard, adopter: Adopter) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module)})
    publish(board, 1)
    board.ask()
    with pytest.raises(RuntimeError), adopter.acting():
        raise RuntimeError
    assert board.note(0, Note.ANSWER) is None


def test_the_learner_reads_what_stands_here(board: CountedBoard, adopter: Adopter) -> None:
    module = Counting()
    adopter.place({"policy": Destination(lambda: module)})
    adopter.tell()
    note = board.note(0)
    assert note is not None
    assert Layout.from_json(note).destinations == {"policy": Leaves(module, "worker").specs()}
