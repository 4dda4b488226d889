"""The flat byte layout: no overlap, aligned, exact."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsync.tensors.layout import ALIGN_BYTES, Layout, LeafSpec, dtype_named

# Slow machines are no failures.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
kinds = st.sampled_from(["parameter", "buffer", "extra_state"])


@st.composite
def leaf_lists(draw: st.DrawFn) -> list[LeafSpec]:
    """Leaves of one destination; some are ties to earlier ones."""
    leaves: list[LeafSpec] = []
    names = draw(st.lists(st.text(max_size=6), unique=True, max_size=8))
    for name in names:
        owners = [leaf for leaf in leaves if not leaf.tie and leaf.name]
        if owners and draw(st.integers(0, 3)) == 0:
            owner = draw(st.sampled_from(owners))
            leaves.append(LeafSpec(name, draw(kinds), owner.shape, owner.dtype, owner.name))
        else:
            leaves.append(LeafSpec(name, draw(kinds), draw(shapes), draw(st.sampled_from(DTYPES))))
    return leaves


layouts = st.dictionaries(st.text(max_size=5), leaf_lists(), max_size=3).map(Layout.build)


def random_bits(leaf: LeafSpec, generator: torch.Generator) -> torch.Tensor:
    """A tensor of random bytes (of 0 and 1 for bool, where others are no values)."""
    top = 2 if leaf.dtype is torch.bool else 256
    raw = torch.randint(0, top, (leaf.payload_bytes,), dtype=torch.uint8, generator=generator)
    if not raw.numel():
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    return raw.view(leaf.dtype).view(leaf.shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@settings(max_examples=50)
@given(layouts)
def test_a_layout_survives_json(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()


@settings(max_examples=50)
@given(layouts)
def test_owned_bytes_are_aligned_within_the_image_and_never_overlap(layout: Layout) -> None:
    end = 0
    for entry in layout.owned:
        assert entry.offset % ALIGN_BYTES == 0
        assert entry.offset >= end
        end = entry.offset + entry.leaf.payload_bytes
    assert end <= layout.image_bytes
    assert layout.image_bytes % ALIGN_BYTES == 0


@settings(max_examples=50)
@given(layouts)
def test_tied_leaves_share_the_bytes_of_their_owner_in_their_destination(layout: Layout) -> None:
    owners = layout.owned
    assert [e.owner for e in owners] == list(range(len(owners)))
    for entry in layout.entries:
        owner = owners[entry.owner]
        if entry.leaf.tie:
            assert (owner.destination, owner.leaf.name) == (entry.destination, entry.leaf.tie)
            assert owner.offset == entry.offset
        else:
            assert owner is entry


@settings(max_examples=30)
@given(layouts, st.integers(0, 2**32))
def test_views_carry_the_exact_bits_of_what_is_written_into_them(layout: Layout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    written = [random_bits(entry.leaf, generator) for entry in layout.owned]
    image = torch.zeros(layout.image_bytes, dtype=torch.uint8)
    views = layout.views(image)
    for view, entry in zip(views, layout.entries, strict=True):
        assert view.shape == entry.leaf.shape
        assert view.dtype is entry.leaf.dtype
        assert view.is_contiguous()
        if not entry.leaf.tie:
            view.copy_(written[entry.owner])

    elsewhere = layout.views(image.clone())  # what another process would map
    for view, tensor in zip(elsewhere, layout.spread(written), strict=True):
        assert bits(view) == bits(tensor)


@settings(max_examples=50)
@given(layouts)
def test_destinations_give_back_what_was_laid_out(layout: Layout) -> None:
    assert Layout.build(dict(layout.destinations)) == layout


def test_writing_a_tie_writes_its_owner() -> None:
    owner = LeafSpec("a", "parameter", (3,), torch.float32)
    tied = LeafSpec("b", "parameter", (3,), torch.float32, tie="a")
    layout = Layout.build({"policy": [owner, tied], "critic": [owner]})
    a, b, other = layout.views(torch.zeros(layout.image_bytes, dtype=torch.uint8))
    b.fill_(7.0)
    assert a.tolist() == [7.0] * 3
    assert other.tolist() == [0.0] * 3
    assert layout.image_bytes == 2 * ALIGN_BYTES
    one, two = torch.ones(3), torch.ones(3) * 2
    assert [t is u for t, u in zip(layout.spread([one, two]), [one, one, two], strict=True)] == ([True] * 3)


def test_any_change_of_the_schema_changes_the_json() -> None:
    base = LeafSpec("a", "parameter", (3,), torch.float32)
    variants = [
        {"policy": [base]},
        {"critic": [base]},
        {"policy": [LeafSpec("b", "parameter", (3,), torch.float32)]},
        {"policy": [LeafSpec("a", "buffer", (3,), torch.float32)]},
        {"policy": [LeafSpec("a", "parameter", (3, 1), torch.float32)]},
        {"policy": [LeafSpec("a", "parameter", (3,), torch.int32)]},
        {"policy": [base, LeafSpec("b", "parameter", (3,), torch.float32)]},
        {"policy": [base, LeafSpec("b", "parameter", (3,), torch.float32, tie="a")]},
        {"policy": [LeafSpec("b", "parameter", (3,), torch.float32), base]},
    ]
    assert len({Layout.build(variant).to_json() for variant in variants}) == len(variants)


def test_bytes_of_a_leaf_are_those_torch_counts() -> None:
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 0), (2, 3)):
            spec = LeafSpec("x", "parameter", shape, dtype)
            assert spec.payload_bytes == torch.empty(shape, dtype=dtype).nbytes
            assert dtype_named(spec.dtype_name) is dtype
