"""This process as a driver of Ray: connected to a cluster, or to a Ray of its own on this machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rlsync.core.errors import ConfigError, first_line
from rlsync.workers.cluster.address import ADDRESS_KEY, check_address, check_reachable

#: Ray gives its processes, and so the workers, a low priority (nice 15). Beside a learner on the same machine
#: they would hardly act.
_OWN_RAY = {"worker_niceness": 0}


class Session:
    """Ray, for as long as a run needs it.

    If this process is connected already, that connection is used, and left as it is. Otherwise this connects,
    or starts a Ray on this machine, which ends with :meth:`close` and with this process.

    Args:
        address: ``HOST:PORT`` of a running cluster; ``"auto"`` for one that was started on this machine;
            ``None`` starts one here.

    Raises:
        ConfigError: Ray is not installed, nothing answers at the address, or Ray refuses.
    """

    def __init__(self, address: str | None = None) -> None:
        check_address(address)
        import ray

        self._connected_here = not ray.is_initialized()
        if not self._connected_here:
            return
        if address is not None and address != "auto":
            check_reachable(address)
        try:
            with _signal_handlers_kept():
                if address is None:
                    ray.init(
                        address="local",
                        include_dashboard=False,
                        logging_level="WARNING",
                        _system_config=_OWN_RAY,
                    )
                else:
                    ray.init(address=address, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"Ray refuses: {first_line(error)}", f"{ADDRESS_KEY}={address}", _cure(error)
            ) from error

    def close(self) -> None:
        """Disconnect, and end the Ray that was started here. A second call does nothing."""
        if self._connected_here:  # asked first: at the end of the program nothing can be imported
            import ray

            self._connected_here = False
            ray.shutdown()


def _cure(error: BaseException) -> str:
    if "auth" in str(error).lower() or "token" in str(error).lower():
        return (
            "the cluster wants a token, or has none: set RAY_AUTH_MODE (token or disabled) as on the head "
            "node, and with token put the same token into ~/.ray/auth_token or RAY_AUTH_TOKEN everywhere"
        )
    return "look at the whole message above; learner and cluster need the same versions of Ray and Python"


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM; the run's own has to stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
