"""A paused collector is asked for its state, as a trainer with async_collection asks at each save."""

from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv

if __name__ == "__main__":
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), shared=True)
    collector = MultiSyncCollector(
        [lambda: GymEnv("Pendulum-v1")], frames_per_batch=10, total_frames=-1, replay_buffer=buffer
    )
    collector.start()
    try:
        with collector.pause():
            print(sorted(collector.state_dict()))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    collector.shutdown(raise_on_error=False)
