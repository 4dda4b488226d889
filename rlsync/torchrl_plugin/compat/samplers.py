"""TorchRL's base class of what draws from a replay buffer."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import Sampler

_FILE = "sampler.pt"


class OwnSampler(Sampler):
    """A sampler that is saved and loaded as its state dict.

    TorchRL asks every sampler for a private ``_empty``. Remove this class when it has a public name.
    """

    @abstractmethod
    def clear(self) -> None:
        """Forget all frames."""

    def dumps(self, path: Path | str) -> None:
        """Write the state into a folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _FILE)

    def loads(self, path: Path | str) -> None:
        """Read what :meth:`dumps` wrote."""
        state: dict[str, Any] = torch.load(Path(path) / _FILE, map_location="cpu", weights_only=True)
        self.load_state_dict(state)

    def _empty(self) -> None:
        self.clear()
