"""Which actors are dead; asked of Ray without waiting for those that are busy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError


class Actors:
    """Asks each actor for a sign of life. Ray answers for one that is dead; a busy one answers later.

    Args:
        actors: by number.
    """

    def __init__(self, actors: Mapping[int, Any]) -> None:
        self._actors = dict(actors)
        self._asked: dict[int, ray.ObjectRef] = {}
        self._dead: set[int] = set()

    def dead(self) -> frozenset[int]:
        """The numbers of those known to be dead; returns at once."""
        for number in self._actors.keys() - self._dead:
            if number not in self._asked:
                self._asked[number] = self._actors[number].__ray_ready__.remote()
            ready, _ = ray.wait([self._asked[number]], timeout=0)
            if ready:
                try:
                    ray.get(self._asked.pop(number))
                except RayActorError:
                    self._dead.add(number)
        return frozenset(self._dead)
