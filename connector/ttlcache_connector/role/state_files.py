"""What an engine knows before its first request, and keeps over restarts."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from ttlcache.clock import Clock, wall_s
from ttlcache.config import TTLCacheConfig
from ttlcache.errors import ConfigError
from ttlcache.estimators import gap_store
from ttlcache.estimators.costs import STEP_TOKENS, CostModel
from ttlcache.estimators.gap_history import GapHistory, GapRecords
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.telemetry.recorder import Recorder
from ttlcache_connector.log import logger

log = logger(__name__)

#: Files in `state_dir`.
PROFILE, HISTORY = "profile.json", "gaps.json"

#: A SIGKILL loses at most this much of the history: seconds per record saved, within
#: bounds. A small history is written often, and none costs a core more than 0.1 %.
SAVE_INTERVAL_S_PER_RECORD = 1e-3
MIN_SAVE_INTERVAL_S = 10.0
MAX_SAVE_INTERVAL_S = 300.0
#: A disk that hangs holds the engine's end up no longer than this.
CLOSE_TIMEOUT_S = 5.0
#: Seconds that the writer sleeps between two keys: it shares Python's lock with the
#: engine's thread.
_PAUSE_S = 0.001


def check(config: TTLCacheConfig) -> None:
    """What an engine would refuse after its model is loaded.

    Raises:
        ConfigError: `state_dir`, the profile in it or `record_path` cannot be used.
    """
    load_costs(config)
    _history_path(config)
    if config.record_path is None:
        return
    folder = Path(config.record_path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise _no_record_path(config, error) from None
    if not is_writable:
        raise _no_record_path(config, "not writable")


def load_costs(config: TTLCacheConfig, step_tokens: int = STEP_TOKENS) -> CostModel:
    """Costs seeded from the profile in `state_dir`, or vLLM-agnostic defaults.

    Args:
        step_tokens: most tokens of an engine step.

    Raises:
        ConfigError: the file is there, but no JSON, or holds something else.
    """
    if config.state_dir is None:
        return CostModel(step_tokens=step_tokens)
    path = Path(config.state_dir) / PROFILE
    try:
        profile = json.loads(path.read_text())
    except FileNotFoundError:
        return CostModel(step_tokens=step_tokens)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"key 'state_dir' has value {config.state_dir!r}, expected: {PROFILE} in "
            f"it to be a readable JSON file, or missing ({error})"
        ) from None
    if not isinstance(profile, dict):
        raise ConfigError(f"profile {str(path)!r}: expected a JSON object")
    return CostModel(profile, step_tokens)


def open_telemetry(
    config: TTLCacheConfig,
    clock: Clock,
    metrics: MetricsBuffer,
    about: dict[str, Any],
) -> Telemetry:
    """Records into `record_path` where that is set.

    Args:
        about: facts about the engine for the head of the recording.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if config.record_path is None:
        return Telemetry(metrics)
    now_s, date_s = clock.now_s(), wall_s()
    header = {
        "wall_minus_clock_s": date_s - now_s,
        "policy": config.policy,
        "config": config.model_dump(),
        **about,
    }
    try:
        recorder = Recorder(
            Path(config.record_path), header, run=f"{int(date_s)}-{os.getpid()}"
        )
    except OSError as error:
        raise _no_record_path(config, error) from None
    return Telemetry(metrics, recorder)


def _no_record_path(config: TTLCacheConfig, why: object) -> ConfigError:
    return ConfigError(
        f"key 'record_path' has value {config.record_path!r}, expected: a folder that "
        f"can be written ({why})"
    )


def _history_path(config: TTLCacheConfig) -> Path | None:
    if config.state_dir is None:
        return None
    folder = Path(config.state_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"key 'state_dir' has value {config.state_dir!r}, expected: a folder, or "
            f"a place for one ({error})"
        ) from None
    return folder / HISTORY


class HistoryFile:
    """The gap history on disk; once it is open, every failure is a warning.

    Raises:
        ConfigError: `state_dir` is not there, and cannot be made.

    The engine's thread copies the records, a thread of its own encodes and writes
    them. There is never more than one such thread.
    """

    def __init__(self, config: TTLCacheConfig, now_s: float) -> None:
        self._path = _history_path(config)
        self._saved_s = now_s
        self._saved_records = 0
        self._interval_s = MIN_SAVE_INTERVAL_S
        self._writer: threading.Thread | None = None
        self._hurry = threading.Event()
        self.gaps = GapHistory() if self._path is None else gap_store.load(self._path)

    def save_if_due(self, now_s: float) -> None:
        """Called before steps: starts to write when it is time. Never waits."""
        if self._path is None or now_s - self._saved_s < self._interval_s:
            return
        if self._is_writing() or self.gaps.num_recorded == self._saved_records:
            return
        self._saved_s = now_s
        self._start()

    def flush(self, timeout_s: float) -> bool:
        """Wait for a write under way; False when it is not done in time."""
        if self._writer is not None:
            self._writer.join(timeout_s)
        return not self._is_writing()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Save for the last time, and wait for it, but for no hanging disk."""
        if self._path is None:
            return
        self._hurry.set()  # no more pauses
        if self.flush(timeout_s):
            self._start()
        if not self.flush(timeout_s):
            log.warning(
                "ttlcache: gap history not saved to %s within %g s",
                self._path,
                timeout_s,
            )

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _start(self) -> None:
        records = gap_store.snapshot(self.gaps)
        self._saved_records = self.gaps.num_recorded
        num_records = sum(len(window.gaps_s) for window in records)
        self._interval_s = min(
            max(MIN_SAVE_INTERVAL_S, num_records * SAVE_INTERVAL_S_PER_RECORD),
            MAX_SAVE_INTERVAL_S,
        )
        self._writer = threading.Thread(
            target=self._write, args=(records,), name="ttlcache-history", daemon=True
        )
        self._writer.start()

    def _write(self, records: list[GapRecords]) -> None:
        assert self._path is not None
        try:
            gap_store.write(
                records, self._path, pause=lambda: self._hurry.wait(_PAUSE_S)
            )
        except Exception:
            log.warning("ttlcache: gap history not saved", exc_info=True)
