"""Learners and workers on an accelerator: whole versions, exact stamps, and no copy that is read too early.

Every test runs on the second device of :mod:`tests.tools.parts.second_device`, which does what it is told as
late as it may; and, where there is a GPU, on CUDA. The programs are in :mod:`tests.tools.device_programs`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.programs import fresh_python, run_program

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
on_a_device = pytest.mark.parametrize(
    "device", ["second", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
)


def ends_well(program: str, device: str) -> None:
    words = ("tests.tools.device_programs", program, device)
    if device == "cuda":  # not forked: some of these programs fork their workers
        done = fresh_python("-m", *words, cwd=ROOT, check=False)
    else:
        done = run_program(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------- the learner


@on_a_device
def test_a_version_holds_what_was_queued_before_its_publish(device: str) -> None:
    ends_well("before_the_publish", device)


@on_a_device
def test_a_version_holds_nothing_that_was_queued_after_its_publish(device: str) -> None:
    ends_well("after_the_publish", device)


@on_a_device
def test_leaves_of_other_dtypes_and_strides_arrive_as_the_board_holds_them(device: str) -> None:
    ends_well("other_dtypes_and_strides", device)


# ----------------------------------------------------------------------------------------- the worker


@on_a_device
def test_work_that_is_still_queued_from_a_rollout_reads_the_version_of_that_rollout(device: str) -> None:
    ends_well("still_queued", device)


@on_a_device
def test_the_views_of_a_version_are_free_when_its_adoption_returns(device: str) -> None:
    ends_well("given_back", device)


@on_a_device
def test_parameters_that_share_memory_share_it_after_an_adoption(device: str) -> None:
    ends_well("tied", device)


@on_a_device
def test_adoption_by_copy_writes_into_the_memory_that_compiled_code_reads(device: str) -> None:
    ends_well("in_place", device)


@on_a_device
def test_a_module_that_was_moved_to_the_device_is_not_pointed_back_at_host_memory(device: str) -> None:
    ends_well("moved", device)


@on_a_device
def test_a_module_that_was_moved_off_the_device_is_not_moved_back(device: str) -> None:
    ends_well("moved_off", device)


# ---------------------------------------------------------------------------------- in one process


@on_a_device
def test_a_version_that_waits_for_a_rollout_is_the_one_that_was_published(device: str) -> None:
    ends_well("staged", device)


@pytest.mark.seconds
@on_a_device
def test_rollouts_and_publishes_on_streams_of_their_own_take_turns(device: str) -> None:
    ends_well("in_turn", device)


@pytest.mark.seconds
@on_a_device
def test_in_one_process_the_plan_tells_an_alias_a_copy_on_the_device_and_one_between_devices(
    device: str,
) -> None:
    ends_well("in_process", device)


# --------------------------------------------------------------------------------- worker processes


@pytest.mark.seconds
@on_a_device
def test_a_learner_and_two_processes_on_one_device_never_tear_or_misname_a_version(device: str) -> None:
    ends_well("both_sides", device)


@pytest.mark.seconds
@on_a_device
def test_either_side_may_be_on_the_device_and_the_plan_says_what_crosses(device: str) -> None:
    ends_well("one_side", device)


@pytest.mark.thorough
@pytest.mark.seconds
@on_a_device
def test_the_workers_of_one_collector_may_be_on_different_devices(device: str) -> None:
    ends_well("workers_differ", device)


@pytest.mark.thorough
@pytest.mark.seconds
@on_a_device
def test_a_learner_on_the_device_publishes_in_the_background_while_it_trains(device: str) -> None:
    ends_well("training", device)


@pytest.mark.seconds
@on_a_device
def test_doctor_says_which_devices_the_weights_are_on_and_what_crosses(device: str) -> None:
    ends_well("doctor", device)


@on_a_device
def test_a_publish_and_an_adoption_are_timed_beside_single_copies(device: str) -> None:
    ends_well("benchmark", device)
