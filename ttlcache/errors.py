"""Every exception that ttlcache raises on purpose.

TTLCacheError
├── ConfigError             a configuration key, type or value is wrong
├── TransferError           a copy plan or a memory layout that cannot be served
└── UnsupportedEngineError  the installed engine was never tested with this release
"""

from __future__ import annotations


class TTLCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(TTLCacheError, ValueError):
    """A configuration value is wrong; the text names key, value and expectation."""


class UnsupportedEngineError(TTLCacheError, RuntimeError):
    """The installed serving engine lies outside the tested range."""


class TransferError(TTLCacheError, ValueError):
    """A layout or plan that our transfer path cannot serve; the text says why.

    Raised where plans are made. An engine that runs a plan never raises: a failed
    copy is an `Outcome`.
    """
