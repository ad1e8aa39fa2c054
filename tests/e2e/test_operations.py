"""What an operator sees of a real server, and what broken clients must not change."""

from __future__ import annotations

import itertools
import re

import httpx
import pytest

from bench.stress.abuse.cli import MAX_HIT_LOSS
from bench.stress.abuse.http import abuse
from bench.stress.soak.watch import MAX_NEW_LINES
from tests.commands import output_of
from tests.documented import commands
from tests.e2e.loads import answers_to_broken, completion
from tests.e2e.test_server import prompt
from tests.test_monitoring import EXPRESSIONS, LMCACHE, names_in
from ttlcache.cli.main import app

pytestmark = pytest.mark.e2e


def test_a_broken_request_gets_vllms_own_answer(agent, vanilla):
    ours = answers_to_broken(agent)
    assert ours == vanilla["broken"]
    assert all(400 <= status < 500 for status, _ in ours)
    assert agent.count("ttlcache_http_errors_total") == 0


@pytest.mark.parametrize("command", commands("server"), ids=lambda c: c.text)
def test_documented_commands_on_a_live_server(command, agent):
    agent.ask(prompt(340, 40), max_tokens=1, hints={"program_id": "job-17"})
    url = agent.server.base_url
    words = [word.replace("localhost:8000", "HOST") for word in command.words]
    if words[0] == "curl":
        done = curl(words[1:], agent)
        assert done.status_code == 200, done.text
        return
    words = [word.replace("http://HOST", url) for word in words[1:]]
    output_of(app, *words, *(["--once"] if words[0] == "top" else []))


def curl(words: list[str], agent) -> httpx.Response:
    """What curl would do with the few options that we document."""
    options = dict(itertools.pairwise(words))
    path = next(w.partition("HOST")[2] for w in words if w.startswith("HOST"))
    path = path.partition("|")[0].strip()
    method = options.get("-X", "GET")
    return agent.http.request(method, path, content=options.get("-d"))


def test_dashboard_and_alerts_name_metrics_of_the_real_endpoint(agent):
    hints = {"program_id": "seen on the dashboard", "tool": "bash"}
    first = agent.ask(prompt(900, 100), hints=hints)
    agent.ask([*first["context"], 8, 9], hints=hints | {"is_last_step": True})
    page = agent.http.get("/metrics").text
    # Declared: most series begin with what they first count.
    exposed = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    exposed |= {f"{name}_bucket" for name in exposed}
    wanted = set().union(*map(names_in, EXPRESSIONS))
    wanted -= set(LMCACHE)  # its own endpoint, seen by test_lmcache_plugins.py
    assert wanted <= exposed, wanted - exposed


def programs_of(agent) -> dict[str, dict]:
    """What `ttlcache top` is told, by program."""
    answer = agent.http.get("/ttlcache/programs").json()
    return {row["program"]: row for row in answer["engines"][0]["programs"]}


def test_progress_in_mid_gap_decides_again(agent):
    agent.ask(prompt(310, 200), hints={"program_id": "slow tool", "ttl": 60})
    assert programs_of(agent)["slow tool"]["pins"] == 1
    path = "/ttlcache/programs/slow%20tool"
    # A day is not worth waiting for, whatever a prefill costs here.
    told = agent.post(f"{path}/progress", eta_s=86_400.0)
    assert (told["known"], told["pins"]) == (True, [])
    assert programs_of(agent)["slow tool"]["pins"] == 0
    assert agent.post(f"{path}/end")["known"] is True
    assert agent.http.post(f"{path}/end").status_code == 404


def test_a_session_in_url_or_header_and_vllm_continuums_fields(agent):
    body = completion(prompt(320, 100), max_tokens=4)
    agent.post("/sessions/by-url/v1/completions", **body)
    agent.ask(prompt(321, 100), headers={"X-Session-ID": "by-header"})
    job = {"job_id": "by-job", "this_func_call": "pytest", "is_last_step": False}
    agent.post("/v1/completions", **body, **job)
    listed = programs_of(agent)
    assert {"by-url", "by-header"} <= listed.keys()
    assert listed["by-job"]["tool"] == "pytest"
    agent.post("/v1/completions", **body, job_id="by-job", is_last_step=True)
    assert "by-job" not in programs_of(agent)
    for name in ("by-url", "by-header"):
        agent.post(f"/ttlcache/programs/{name}/end")


def test_programs_are_ended_under_the_ids_that_clients_are_told(agent):
    body = completion(prompt(330, 100), max_tokens=4)
    named = agent.http.post(
        "/v1/completions", json=body, headers={"session-id": "of a/client"}
    )
    told = named.headers["x-ttlcache-program"]
    assert told == "of%20a%2Fclient"
    unnamed = agent.http.post("/v1/completions", json=completion(prompt(331, 9)))
    assert unnamed.status_code == 200
    assert "x-ttlcache-program" not in unnamed.headers
    newest = next(iter(programs_of(agent)))
    assert newest.startswith("anonymous-")
    for program in (told, newest):
        agent.post(f"/ttlcache/programs/{program}/end")
    assert not {"of a/client", newest} & programs_of(agent).keys()


@pytest.mark.parametrize(
    "sessions", [150, pytest.param(1000, marks=pytest.mark.nightly)]
)
def test_greedy_sessions_cost_a_tenant_beside_them_little(agent, sessions):
    """tests/connector/test_abuse.py has 10,000 on vLLM's scheduler without a server."""
    agent.post("/reset_prefix_cache")
    found = abuse(agent.server, sessions)
    agent.post("/reset_prefix_cache")
    assert found.refused == 0
    assert found.after.programs > sessions / 5, "the sessions were not seen as programs"
    assert found.after.metrics_lines <= found.before.metrics_lines + MAX_NEW_LINES
    assert found.after.metrics_bytes < found.before.metrics_bytes + 20_000
    assert found.after.hook_errors == found.before.hook_errors
    assert found.after.retention_enabled == 1
    assert found.hit_calm > 0.5
    assert found.hit_flooded >= found.hit_calm - MAX_HIT_LOSS
