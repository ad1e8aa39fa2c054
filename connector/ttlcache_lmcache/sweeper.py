"""A thread that lets time pass for a store, whatever that raises."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Seconds between two looks.
INTERVAL_S = 1.0


class Sweeper:
    """Calls `sweep` every `INTERVAL_S` seconds until it is stopped."""

    def __init__(
        self,
        name: str,
        sweep: Callable[[], object],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._sweep = sweep
        self._on_error = on_error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self._sweep()
            except Exception as error:  # noqa: BLE001 - the thread must live on
                self._on_error(error)
