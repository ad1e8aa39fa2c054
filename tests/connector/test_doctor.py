"""`ttlcache doctor`: good news, bad news, and never a traceback."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.connector.test_serve_tiers import missing
from ttlcache.cli.main import app
from ttlcache.config import TTLCacheConfig
from ttlcache_connector.cli.doctor import findings
from ttlcache_connector.cli.doctor_template import BAD, OK
from ttlcache_connector.engine import requirements
from ttlcache_lmcache import compat as lmcache_compat


def run(*command: str, **options: Any) -> Result:
    return CliRunner().invoke(app, command, **options)


def states(config: str = "{}", url: str | None = None) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings(config, url)}


def test_this_machine_is_fine():
    found = states()
    assert BAD not in found.values()
    assert {"vllm", "plugin", "policy", "GPU"} <= set(found)


@pytest.mark.parametrize(
    ("config", "admission"),
    [
        ("{}", "room-to-grow"),
        ('{"cpu_gb": 1}', "none"),
        ('{"policy": "none"}', "none"),
    ],
)
def test_the_tier_that_auto_is_here_counts(config, admission):
    found = {finding.what: finding.text for finding in findings(config)}
    assert found["policy"].endswith(f"admission {admission}")
    assert found.get("lower tier") == ("cpu 1 GB" if "cpu_gb" in config else None)
    assert states('{"cpu_gb": 64000}')["lower tier"] == BAD


@pytest.mark.parametrize(
    ("name", "state"), [("new", OK), ("file", BAD), ("x" * 300, BAD)]
)
def test_folders_need_not_be_there_but_a_place_for_them(tmp_path, name, state):
    (tmp_path / "file").touch()
    place = str(tmp_path / name / "one")
    assert states(json.dumps({"record_path": place}))["record_path"] == state


@pytest.mark.parametrize(
    "config",
    [
        *(
            '{"polcy": 1}',
            "{",
            "[" * 10_000,
            '{"policy": "x"}',
            "[1]",
            "5",
            '"fixed"',
            "null",
        ),
        '{"kv_connector": "TTLConnector", "kv_role": "kv_both"}',
    ],
)
def test_a_wrong_configuration_is_bad(config):
    assert states(config)["configuration"] == BAD


def test_a_lower_tier_that_the_server_would_refuse_is_bad(monkeypatch):
    wanted = '{"lower_tier": "lmcache"}'
    with monkeypatch.context() as without:
        without.setattr(importlib.metadata, "version", missing)
        assert states(wanted)["lower tier"] == BAD
    pytest.importorskip("lmcache", reason="LMCache is an extra")
    assert states(wanted)["lower tier"] == OK
    monkeypatch.setattr(lmcache_compat, "lmcache_version", lambda: "0.9.0")
    assert states(wanted)["lower tier"] == BAD


def test_an_untested_vllm_or_a_plugin_list_without_us_is_bad(monkeypatch):
    monkeypatch.setattr(requirements, "vllm_version", lambda: "0.99.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = states()
    assert (found["vllm"], found["plugin"]) == (BAD, BAD)
    assert states('{"allow_untested_vllm": true}')["vllm"] == OK


#: What other servers, and older ones, could answer at our path.
FOREIGN = [
    *("<html>", "", "[]", "5", "null", "[" * 100_000, '{"error": "no"}'),
    *('{"engines": 5}', '{"engines": ["x"]}', '{"engines": [{"gauges": 3}]}'),
    '{"engines": [{"programs": [{"name": "x"}]}]}',
]


URL = "http://server"


@pytest.fixture
def answers(monkeypatch):
    """A server with our metrics that says a text at our path."""

    def says(text: str) -> None:
        def handle(_: object, request: httpx.Request) -> httpx.Response:
            ours = request.url.path == "/metrics"
            return httpx.Response(200, text="ttlcache_pool_blocks 5" if ours else text)

        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)

    return says


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: text[:40])
@pytest.mark.parametrize("command", [["doctor"], ["top", "--once"]])
def test_a_foreign_answer_is_said_to_be_one(answers, text, command):
    answers(text)
    done = run(*command, "--url", URL, env={"COLUMNS": "400"})
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    assert "/ttlcache/programs is not ttlcache's" in done.output


def test_our_own_answer_is_read(answers):
    row = {
        "program": "p",
        "turns": 1,
        "running": 0,
        "waiting": 0,
        "tool": "",
        "gap_s": None,
    }
    row |= {"pins": 0, "pinned_blocks": 0, "ttl_left_s": None}
    engines = [{"programs": [row]}, {"gauges": {"x": 1}}]
    answers(json.dumps({"engines": engines}))
    done = run("top", "--url", URL)  # no terminal: one look
    assert done.exit_code == 0, done.output
    found = findings("{}", URL)
    bad = [f.text for f in found if (f.what, f.state) == ("server", BAD)]
    assert bad == ["retention has turned itself off: see its log"] * 2


def test_a_servers_own_settings_are_shown_and_not_those_of_this_command(answers):
    settings = TTLCacheConfig(
        policy="fixed", policy_options={"ttl_s": 2.0}, record_path="/there"
    ).model_dump()
    settings |= {"ordering": "ttl-aware", "admission": "none"}
    settings |= {"ttlcache": "9.9", "vllm": "0.99", "a key": "of a later version"}
    gauges = {"retention_enabled": 1.0, "tier_up": 0.0}
    for tier, state in (("none", None), ("cpu", BAD)):
        engine = {"settings": settings | {"lower_tier": tier}, "gauges": gauges}
        answers(json.dumps({"engines": [engine]}))
        found = {f.what: f for f in findings(None, URL)}
        assert not {"policy", "record_path", "profile"} & found.keys()
        policy = found["server's policy"].text
        assert policy == "fixed {'ttl_s': 2.0}, ordering ttl-aware, admission none"
        assert found["server's ttlcache"].text == "9.9 on vLLM 0.99"
        changed = ['record_path: "/there"']
        if tier != "none":
            changed.append(f'lower_tier: "{tier}"')
        assert set(found["server's settings"].text.split(", ")) == set(changed)
        assert "server's record_path" not in found
        down = found.get("server's tier")
        assert (down and down.state) == state


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "no server answers"),
        *((url, "no address") for url in ("nonsense", "http://x:abc", "http://x\n")),
    ],
)
def test_why_a_server_is_not_reached_is_said_in_plain_words(url, why):
    assert states(url=url)["server"] == BAD
    done = run("top", "--once", "--url", url)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    told = " ".join(done.output.split())
    assert why in told
    assert not any(word in told for word in ("Errno", "protocol", "Invalid"))


def test_the_exit_status_is_the_verdict():
    assert run("doctor").exit_code == 0
    failed = run("doctor", "--config", '{"polcy": 1}')
    assert failed.exit_code == 1
    assert "did you mean" in failed.output
