"""Tests that need a CUDA device; without one each says so."""

from __future__ import annotations

import pytest

from ttlcache.errors import TransferError
from ttlcache.transfer.cupy_runtime import CupyRuntime


@pytest.fixture(scope="session")
def runtime():
    try:
        return CupyRuntime(0)
    except TransferError as error:
        pytest.skip(f"not run: {error}")
