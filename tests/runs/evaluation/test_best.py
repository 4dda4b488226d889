"""best.pt: what is damaged is refused, and what is loaded is what was written."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from rlsync.core.errors import ConfigError
from rlsync.core.machine import machines
from rlsync.runs.evaluation.process import Best, best_in


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Best]:
    weights = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7), "none": torch.empty(0)}
    best = Best(version=12, return_mean=101.5, rank=98.25, weights=weights, run_id="it")
    best.write(tmp_path / "best.pt")
    return tmp_path / "best.pt", best


def test_no_flipped_bit_is_loaded(written: tuple[Path, Best]) -> None:
    file, best = written
    whole, refused = file.read_bytes(), 0
    assert best_in(file) is not None
    for at in range(0, len(whole), 17):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            loaded = best_in(file)
        except ConfigError:
            refused += 1
        else:  # the bit is one of padding, or of what nobody reads
            assert loaded is not None
            assert loaded.digest() == best.digest()
    assert refused > 20


def test_a_machine_that_refuses_to_write_it_says_why_and_the_one_before_stays(
    written: tuple[Path, Best],
) -> None:
    file, best = written
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as refusal:
            best.write(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert machines(refusal.value) is refusal.value, "so that the run's error has a cure"
    assert file.read_bytes() == before


def test_a_file_that_was_cut_is_refused_as_one(written: tuple[Path, Best]) -> None:
    file, _ = written
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"cannot read the best version: .*archive"):
        best_in(file)


def test_an_empty_file_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "best.pt").touch()
    with pytest.raises(ConfigError, match=r"cannot read the best version: [A-Z]"):
        best_in(tmp_path / "best.pt")


def test_an_altered_version_is_refused_and_one_without_a_digest_needs_trust(
    written: tuple[Path, Best],
) -> None:
    file, best = written
    held = torch.load(file, weights_only=True)
    torch.save(held | {"version": 13}, file)
    with pytest.raises(ConfigError, match="its content is not what was written"):
        best_in(file, trusted=True)
    del held["digest"]
    torch.save(held, file)
    with pytest.raises(ConfigError, match="it has no digest"):
        best_in(file)
    loaded = best_in(file, trusted=True)
    assert loaded is not None
    assert loaded.digest() == best.digest()
