"""What every test may rely on, whichever ran before it in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine may hold up any single example.
settings.register_profile("ttlcache", deadline=None)
settings.load_profile("ttlcache")

OUR_LOGGERS = ("ttlcache", "ttlcache_lmcache", "vllm.ttlcache_connector")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests go to one worker: what its fixtures start is started once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(autouse=True)
def our_loggers_speak() -> Iterator[None]:
    """Imports of other packages silence the root logger, or all but their own."""
    names = [
        name
        for name in logging.Logger.manager.loggerDict
        if name.split(".")[0] in OUR_LOGGERS or name.startswith(OUR_LOGGERS[2])
    ]
    loggers = [logging.getLogger(name) for name in {*names, *OUR_LOGGERS[:2]}]
    before = [(each, each.level, each.disabled) for each in loggers]
    for each in loggers:
        each.disabled = False
    for name in OUR_LOGGERS[:2]:
        logging.getLogger(name).setLevel(logging.WARNING)
    yield
    for each, level, disabled in before:
        each.setLevel(level)
        each.disabled = disabled
