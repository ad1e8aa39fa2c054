"""`ttlcache doctor`: good news, bad news, and never a traceback."""

from __future__ import annotations

import json
import socket

import pytest
from typer.testing import CliRunner

from ttlcache.cli import app
from ttlcache_connector import compat
from ttlcache_connector.cli.doctor import BAD, OK, findings


def states(config: str = "{}", **kwargs: object) -> dict[str, str]:
    found = findings(config, kwargs.get("url"), kwargs.get("lmcache"))
    return {finding.what: finding.state for finding in found}


def test_this_machine_is_fine():
    found = states()
    assert BAD not in found.values()
    assert {"vllm", "plugin", "middleware", "policy", "GPU", "lmcache"} <= set(found)


def test_every_documented_key_is_checked(tmp_path):
    profile = tmp_path / "p.json"
    profile.write_text('{"prefill": [1e-4, 0, 0]}')
    good = {"record_path": str(tmp_path), "profile_path": str(profile)}
    found = states(json.dumps(good))
    assert (found["record_path"], found["profile_path"]) == (OK, OK)
    profile.write_text("{")
    assert states(json.dumps(good))["profile_path"] == BAD


@pytest.mark.parametrize("config", ['{"polcy": 1}', "{", '{"policy": "x"}'])
def test_a_wrong_configuration_is_bad(config):
    assert states(config)["configuration"] == BAD


def test_an_untested_vllm_is_bad_unless_allowed(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    assert states()["vllm"] == BAD
    assert states('{"allow_untested_vllm": true}')["vllm"] == OK


def test_a_plugin_list_without_us_is_bad(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert states()["plugin"] == BAD


def test_addresses_that_answer_and_that_do_not():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert states(lmcache=address)["LMCache server"] == OK
    assert states(lmcache="127.0.0.1:1")["LMCache server"] == BAD
    assert states(lmcache="nonsense")["LMCache server"] == BAD
    assert states(url="http://127.0.0.1:1")["server"] == BAD


def test_the_exit_status_is_the_verdict():
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    failed = CliRunner().invoke(app, ["doctor", "--config", '{"polcy": 1}'])
    assert failed.exit_code == 1
    assert "did you mean" in failed.output
