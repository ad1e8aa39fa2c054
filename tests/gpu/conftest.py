"""Tests that need a CUDA device: without one the session ends with status 3."""

from pathlib import Path

import pytest

from ttlcache.errors import TransferError
from ttlcache.transfer.cupy_runtime import CupyRuntime

NO_DEVICE = 3


def pytest_collection_finish(session):
    """Unless other tests were asked for as well: they run, these are skipped."""
    here = Path(__file__).parent
    if session.items and all(here in item.path.parents for item in session.items):
        try:
            CupyRuntime(0)
        except TransferError as error:
            pytest.exit(f"tests/gpu did not run: {error}", returncode=NO_DEVICE)


@pytest.fixture(scope="session")
def runtime():
    try:
        return CupyRuntime(0)
    except TransferError as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture
def torch_device(runtime):
    """Torch's CUDA device; with tests/stand_in the CPU, registered as the device's."""
    torch = pytest.importorskip("torch")
    import cupy

    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if "stand_in" not in cupy.__file__:
        pytest.skip("not run: torch sees no CUDA device")
    return torch.device("cpu")
