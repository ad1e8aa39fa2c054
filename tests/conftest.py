"""What every test may rely on, whichever ran before it in this process."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from hypothesis import settings

# A busy machine may hold up any single example.
settings.register_profile("ttlcache", deadline=None)
settings.load_profile("ttlcache")

OUR_LOGGERS = ("ttlcache", "ttlcache_lmcache", "vllm.ttlcache_connector")


# --- where tests run when there are several workers (make test) ---------------

#: Tests of e2e without the server that all others share.
ALONE = ("test_lmcache_plugins", "test_tiers")
SERVER = re.compile(rf"tests/e2e/(?!{'|'.join(ALONE)})test_\w+\.py")


def group_of(nodeid: str) -> str:
    """What runs in one worker: a file, whose fixtures are then made once.

    The tests of the session's vLLM server are one group.
    """
    return "server" if SERVER.match(nodeid) else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """That server first: nothing else takes so long."""
    items.sort(key=lambda item: group_of(item.nodeid) != "server")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(autouse=True)
def our_loggers_speak():
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
