"""Plain data as text that every reader of JSON takes."""

from __future__ import annotations

import json
import math
from typing import Any


def json_of(value: Any, indent: int | None = 2) -> str:
    """Plain data as JSON; null for what JSON has no number for: infinities, and what is not a number."""
    return json.dumps(_in_json(value), indent=indent, allow_nan=False)


def _in_json(value: Any) -> Any:
    match value:
        case float():
            if math.isfinite(value):
                return value
            return None
        case dict():
            return {key: _in_json(each) for key, each in value.items()}
        case list() | tuple():
            return [_in_json(each) for each in value]
        case _:
            return value
