"""A worker was killed, by the kernel for its memory, say; the next update of weights waits for it."""

import threading

from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv

if __name__ == "__main__":
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncCollector(
        [lambda: GymEnv("Pendulum-v1")], policy, frames_per_batch=10, total_frames=-1
    )
    collector.procs[0].kill()
    collector.procs[0].join()
    update = threading.Thread(target=collector.update_policy_weights_, daemon=True)
    update.start()
    update.join(10.0)
    print("hangs: no answer after 10 s" if update.is_alive() else "came back")
    collector.shutdown(timeout=1.0, raise_on_error=False)
