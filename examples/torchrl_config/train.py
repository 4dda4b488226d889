"""TorchRL's own trainer, built from TorchRL's own configs, with rlsync's hooks and scheme.

    python examples/torchrl_config/train.py [key=value ...]

One call, register(), adds rlsync's parts to TorchRL's config groups. The rest is as in any script that trains
from such a config. The config is ppo.yaml, in the same folder.
"""

from __future__ import annotations

import warnings

import hydra
import torch
from omegaconf import DictConfig
from torchrl.trainers import Trainer

from rlsync import RlsyncWarning
from rlsync.runs.config.torchrl_configs import register


def versions_seen(trainer: Trainer) -> list[tuple[int, int]]:
    """A list that gets the lowest and the highest version of each batch while the trainer trains."""
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
    warnings.filterwarnings("default", category=RlsyncWarning)
    trainer = hydra.utils.instantiate(config.trainer)
    acted = versions_seen(trainer)
    trainer.train()
    print("versions that acted, batch by batch:", acted)


if __name__ == "__main__":
    register()
    main()
