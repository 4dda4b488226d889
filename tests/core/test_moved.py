"""Modules that were documented under another name still work, and say where to import from."""

from __future__ import annotations

import importlib

import pytest

OLD = {
    "rlsync.transport.base.Apply": "rlsync.transport.contract.Apply",
    "rlsync.transport.base.Publisher": "rlsync.transport.contract.Transport",
    "rlsync.transport.base.Subscriber": "rlsync.transport.contract.Subscriber",
    "rlsync.transport.board_reader.BoardReader": "rlsync.transport.board.reader.BoardReader",
    "rlsync.transport.board_handle.BoardHandle": "rlsync.transport.board.handle.BoardHandle",
    "rlsync.transport.board_format.ReaderStatus": "rlsync.transport.contract.ReaderStatus",
}


def named(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", list(OLD))
def test_an_old_place_gives_what_stands_at_the_new_one_with_a_warning(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"is now {OLD[old]}"):
        found = named(old)
    assert found is named(OLD[old])


def test_an_old_place_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Aply'"):
        named("rlsync.transport.base.Aply")
