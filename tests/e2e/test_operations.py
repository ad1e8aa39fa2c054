"""What an operator sees of a real server, and what broken clients must not change."""

from __future__ import annotations

import itertools

import httpx
import pytest
from typer.testing import CliRunner

from tests.documented import of_servers
from tests.e2e.loads import answers_to_broken
from tests.e2e.test_server import prompt
from tests.test_monitoring import EXPRESSIONS, LMCACHE, names_in
from ttlcache.cli import app

pytestmark = pytest.mark.e2e


def test_a_broken_request_gets_vllms_own_answer(agent, vanilla):
    ours = answers_to_broken(agent)
    assert ours == vanilla["broken"]
    assert all(400 <= status < 500 for status, _ in ours)
    assert agent.count("ttlcache_http_errors_total") == 0


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_top_shows_the_live_server(agent):
    agent.ask(prompt(300, 100), hints={"program_id": "seen-by-top", "tool": "bash"})
    url = agent.server.base_url
    shown = run("top", "--once", "--url", url)
    assert "seen-by-top" in shown
    assert "of 139 blocks" in shown
    agent.ask([9], max_tokens=1, hints={"program_id": "seen-by-top", "ttl": 0})


@pytest.mark.parametrize("command", of_servers(), ids=lambda c: c.text)
def test_documented_commands_on_a_live_server(command, agent):
    agent.ask(prompt(340, 40), max_tokens=1, hints={"program_id": "job-17"})
    url = agent.server.base_url
    words = [word.replace("localhost:8000", "HOST") for word in command.words]
    if words[0] == "curl":
        done = curl(words[1:], agent)
        assert done.status_code == 200, done.text
        return
    words = [word.replace("http://HOST", url) for word in words[1:]]
    run(*words, *(["--once"] if words[0] == "top" else []))


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
    exposed = {name for name, _ in agent.server.metrics()}
    wanted = set().union(*map(names_in, EXPRESSIONS))
    wanted.discard("ttlcache_reload_seconds_bucket")  # there after the first reload
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
    told = agent.http.post(f"{path}/progress", json={"eta_s": 86_400.0})
    assert told.json()["known"] is True
    assert told.json()["pins"] == []
    assert programs_of(agent)["slow tool"]["pins"] == 0
    assert agent.http.post(f"{path}/end").json()["known"] is True
    assert agent.http.post(f"{path}/end").status_code == 404


def test_a_session_in_the_url_and_vllm_continuums_fields(agent):
    body = {
        "model": "tiny",
        "prompt": prompt(320, 100),
        "max_tokens": 4,
        "ignore_eos": True,
    }
    done = agent.http.post("/sessions/by-url/v1/completions", json=body)
    assert done.status_code == 200, done.text
    job = {"job_id": "by-job", "this_func_call": "pytest", "is_last_step": False}
    agent.http.post("/v1/completions", json={**body, **job}).raise_for_status()
    listed = programs_of(agent)
    assert "by-url" in listed
    assert listed["by-job"]["tool"] == "pytest"
    last = {"job_id": "by-job", "is_last_step": True}
    agent.http.post("/v1/completions", json={**body, **last}).raise_for_status()
    assert "by-job" not in programs_of(agent)
    assert agent.http.post("/ttlcache/programs/by-url/end").status_code == 200
