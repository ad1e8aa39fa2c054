"""Suites for contracts, for tests of code built on ttlcache: `policy_contract`."""
