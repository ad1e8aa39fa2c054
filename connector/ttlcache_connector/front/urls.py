"""URLs that the front is started with."""

from __future__ import annotations

import httpx

from ttlcache.errors import ConfigError

_EXPECTED = "an address such as http://127.0.0.1:8000"


def base_url(key: str, value: str) -> httpx.URL:
    """`value` as a URL that requests can go to.

    Raises:
        ConfigError: none can; it names the key, the value and what was expected.
    """
    try:
        url = httpx.URL(value.strip().rstrip("/"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{key}: {value!r}: {error}; expected {_EXPECTED}") from None
    for wrong, why in (
        (url.scheme not in ("http", "https"), "it does not begin with http://"),
        (not url.host or "%" in url.host, "it names no host"),
        (url.port is not None and not 0 < url.port < 2**16, "no such port"),
        (bool(url.query or url.fragment), "it has a query"),
    ):
        if wrong:
            raise ConfigError(f"{key}: {value!r}: {why}; expected {_EXPECTED}")
    return url


def without_user(value: str) -> str:
    """The URL without user and password, to be shown."""
    return str(httpx.URL(value).copy_with(userinfo=b""))
