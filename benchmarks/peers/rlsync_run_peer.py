"""A run of ``rlsync train``, from its first frame to its end, with its frames, its updates and its return.

    python benchmarks/peers/rlsync_run_peer.py recipe=dqn recipe.total_frames=12000 [--cold]

It takes the overrides of ``rlsync train`` and writes its run folder into a temporary one; --cold: what it
compiles, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from rlsync import SyncWeights
from rlsync.cli.compose import command_line
from rlsync.cli.job import jobs_of
from rlsync.cli.train import prepare_process
from rlsync.recipes.hooks.steering import EpisodeReturns
from rlsync.torchrl_plugin.compat.trainers import registered_modules


def main() -> None:
    prepare_process()
    (job,) = jobs_of(command_line.read([word for word in sys.argv[1:] if word != "--cold"]))
    with tempfile.TemporaryDirectory() as run_dir, tempfile.TemporaryDirectory() as empty:
        if "--cold" in sys.argv:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        trainer = job.placed(run_dir, None).build()
        parts = registered_modules(trainer)
        (returns,) = (part for part in parts if isinstance(part, EpisodeReturns))
        (sync,) = (part for part in parts if isinstance(part, SyncWeights))

        def report() -> None:
            said = {"steps": trainer.collected_frames, "updates": sync.counters().optim_steps}
            print("@", json.dumps(said | {"reached": int(returns.reached)}), flush=True)

        report()
        try:
            trainer.train()
        finally:
            trainer.collector.shutdown()
        report()


if __name__ == "__main__":
    main()
