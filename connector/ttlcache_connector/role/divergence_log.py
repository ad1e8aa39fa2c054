"""Says once a cause that clients' prompts do not begin with their last contexts."""

from __future__ import annotations

from ttlcache.programs.divergence import Cause
from ttlcache.programs.model import RequestRecord
from ttlcache_connector.log import logger

log = logger(__name__)


class DivergenceLog:
    """One line for each cause by which contexts are computed again."""

    def __init__(self) -> None:
        self._logged: set[Cause] = set()

    def on_arrival(self, record: RequestRecord) -> None:
        found = record.divergence
        if found is None or not (found.is_sure and found.cause.is_early):
            return
        if found.cause not in self._logged:
            self._logged.add(found.cause)
            log.warning(
                "ttlcache: %s. No prefix cache can hit behind that token (logged once; "
                "ttlcache_turns_diverged_total counts, ttlcache explain shows each)",
                found,
            )
