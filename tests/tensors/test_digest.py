"""The fingerprint: equal for equal bytes, different for a changed bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsync.tensors.digest import _BLOCK_WORDS, all_finite, digest, writes
from rlsync.tensors.layout import Layout, LeafSpec

# Slow machines are no failures.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
contents = st.lists(st.binary(max_size=40), max_size=5)


def tensors_of(blobs: list[bytes]) -> list[torch.Tensor]:
    return [torch.tensor(list(blob), dtype=torch.uint8) for blob in blobs]


@given(contents)
def test_equal_bytes_give_equal_digests(blobs: list[bytes]) -> None:
    first = digest(tensors_of(blobs))
    assert first == digest(tensors_of(blobs))
    assert 0 <= first < 2**64


@given(contents, contents)
def test_different_bytes_give_different_digests(a: list[bytes], b: list[bytes]) -> None:
    assert (digest(tensors_of(a)) == digest(tensors_of(b))) == (a == b)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_single_bit_counts(blob: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    flipped = bytearray(blob)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digest(tensors_of([blob])) != digest(tensors_of([bytes(flipped)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (2, 0)])
def test_any_dtype_and_shape_has_a_digest_and_it_is_that_of_a_copy(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    assert digest([tensor]) == digest([tensor.clone()])
    if tensor.numel():
        assert digest([tensor]) != digest([tensor * 0])


def test_bool_is_digested_too() -> None:
    assert digest([torch.tensor([True, False])]) != digest([torch.tensor([False, True])])


def test_swapped_words_swapped_blocks_and_swapped_leaves_are_noticed() -> None:
    words = torch.arange(3 * _BLOCK_WORDS, dtype=torch.int64)
    swapped = words.clone()
    swapped[[0, 1]] = words[[1, 0]]
    blocks = words.roll(_BLOCK_WORDS)
    a, b = torch.ones(3), torch.zeros(3)
    assert len({digest([words]), digest([swapped]), digest([blocks])}) == 3
    assert digest([a, b]) != digest([b, a])


def test_where_one_leaf_ends_and_the_next_begins_is_noticed() -> None:
    flat = torch.arange(8.0)
    assert digest([flat]) != digest([flat[:4], flat[4:]])
    assert digest([flat[:2], flat[2:]]) != digest([flat[:4], flat[4:]])


def test_how_many_zeros_there_are_is_noticed() -> None:
    assert len({digest([torch.zeros(n)]) for n in range(20)}) == 20
    assert digest([torch.zeros(3)]) != digest([torch.zeros(3), torch.zeros(0)])


def test_the_last_word_of_a_long_leaf_counts() -> None:
    words = torch.zeros(2 * _BLOCK_WORDS + 5, dtype=torch.int64)
    before = digest([words])
    words[-1] = 1
    assert digest([words]) != before


def test_a_transposed_view_is_digested_as_its_contiguous_copy() -> None:
    square = torch.arange(12.0).reshape(3, 4)
    assert digest([square.t()]) == digest([square.t().contiguous()])
    assert digest([square.t()]) != digest([square])


def test_unaligned_memory_makes_no_difference() -> None:
    raw = torch.arange(101, dtype=torch.uint8)
    assert digest([raw[1:]]) == digest([raw[1:].clone()])


def test_gradients_are_no_obstacle_and_none_is_recorded() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert digest([weight]) == digest([torch.ones(3)])
    assert weight.grad is None


def test_a_slot_image_has_the_digest_of_its_source() -> None:
    specs = [
        LeafSpec("w", "parameter", (5, 3), torch.float32),
        LeafSpec("n", "buffer", (), torch.int64),
        LeafSpec("h", "buffer", (3,), torch.bfloat16),
    ]
    layout = Layout.build({"policy": specs})
    source = [torch.randn(5, 3), torch.tensor(4), torch.randn(3, dtype=torch.bfloat16)]
    views = layout.views(torch.full((layout.image_bytes,), 0xAA, dtype=torch.uint8))
    torch._foreach_copy_(views, source)
    assert digest(views) == digest(source)


def test_a_number_that_a_cast_makes_infinite_is_not_finite() -> None:
    big = torch.tensor([1e30])
    assert all_finite(big)
    assert not all_finite(big, torch.float16)


def test_a_write_is_counted() -> None:
    weight = torch.zeros(2)
    before = writes(weight)
    weight.add_(1)
    assert writes(weight) == before + 1
