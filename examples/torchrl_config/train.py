"""TorchRL's own trainer from TorchRL's own configs, with rlsync's hook and scheme: see ppo.yaml beside it.

    python examples/torchrl_config/train.py [key=value ...]

One call, register(), puts rlsync's parts into TorchRL's config groups; the rest is what any script does that
trains from such a config.
"""

from __future__ import annotations

import warnings

import hydra
import torch
from omegaconf import DictConfig
from torchrl.trainers import Trainer

from rlsync.cli.torchrl_configs import register


def versions_seen(trainer: Trainer) -> list[tuple[int, int]]:
    """A list that grows as the trainer trains: the lowest and the highest version of each batch."""
    seen: list[tuple[int, int]] = []

    def watch(batch):
        versions = batch["policy_version"]
        seen.append((int(versions.min()), int(versions.max())))

    trainer.register_op("pre_steps_log", watch)
    return seen


@hydra.main(config_path=".", config_name="ppo", version_base="1.3")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    trainer = hydra.utils.instantiate(config.trainer)
    acted = versions_seen(trainer)
    trainer.train()
    print("versions that acted, batch by batch:", acted)


if __name__ == "__main__":
    register()
    main()
