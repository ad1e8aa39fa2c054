"""`ttlcache doctor`: good news, bad news, and never a traceback."""

from __future__ import annotations

import contextlib
import http.server
import importlib.metadata
import json
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from ttlcache.cli import app
from ttlcache_connector.cli.doctor import findings
from ttlcache_connector.engine import requirements
from ttlcache_lmcache.findings import BAD, NOTE, OK
from ttlcache_lmcache.store import disk_index


def states(
    config: str = "{}", url: str | None = None, lmcache: str | None = None
) -> dict[str, str]:
    found = findings(config, url, [] if lmcache is None else [lmcache])
    return {finding.what: finding.state for finding in found}


def test_this_machine_is_fine():
    found = states()
    assert BAD not in found.values()
    assert {"vllm", "plugin", "middleware", "policy", "GPU", "lmcache"} <= set(found)


def test_every_documented_key_is_checked(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text('{"prefill": [1e-4, 0, 0]}')
    good = {"record_path": str(tmp_path), "state_dir": str(tmp_path)}
    found = states(json.dumps(good))
    assert {found[what] for what in ("record_path", "state_dir", "profile")} == {OK}
    profile.write_text("{")
    assert states(json.dumps(good))["profile"] == BAD


def test_folders_need_not_be_there_but_a_place_for_them(tmp_path):
    (tmp_path / "file").touch()
    for name, state in (("new", OK), ("file", BAD)):
        place = str(tmp_path / name / "one")
        found = states(json.dumps({"record_path": place, "state_dir": place}))
        assert (found["record_path"], found["state_dir"]) == (state, state)


@pytest.mark.parametrize(
    "config",
    [
        *('{"polcy": 1}', "{", '{"policy": "x"}', "[1]", "5", '"fixed"', "null"),
        '{"kv_connector": "TTLConnector", "kv_role": "kv_both"}',
    ],
)
def test_a_wrong_configuration_is_bad(config):
    assert states(config)["configuration"] == BAD


def test_a_lower_tier_that_the_server_would_refuse_is_bad(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    wanted = '{"lower_tier": "lmcache"}'
    with monkeypatch.context() as without:
        without.setattr(importlib.metadata, "version", missing)
        assert states(wanted)["lower tier"] == BAD
        assert states()["lmcache"] == NOTE
    pytest.importorskip("lmcache", reason="LMCache is an extra")
    assert states(wanted)["lower tier"] == OK
    monkeypatch.setattr(requirements, "vllm_version", lambda: "0.31.0")
    assert states(wanted)["lower tier"] == BAD


def test_an_untested_vllm_is_bad_unless_allowed(monkeypatch):
    monkeypatch.setattr(requirements, "vllm_version", lambda: "0.99.0")
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
        assert states(lmcache=f"tcp://{address}")["LMCache server"] == OK
    assert states(lmcache="127.0.0.1:1")["LMCache server"] == BAD
    assert states(lmcache="nonsense")["LMCache server"] == BAD
    assert states(url="http://127.0.0.1:1")["server"] == BAD


#: What other servers, and older ones, could answer at our path.
FOREIGN = [
    "<html>",
    "",
    "[]",
    "5",
    "null",
    "[" * 100_000,
    '{"error": "no"}',
    '{"engines": 5}',
    '{"engines": ["x"]}',
    '{"engines": [{"gauges": 3}]}',
    '{"engines": [{"programs": [{"name": "x"}]}]}',
]


@contextlib.contextmanager
def answering(text: str) -> Iterator[str]:
    """The URL of a server with our metrics that says `text` at our path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            ours = self.path == "/metrics"
            self.wfile.write(b"ttlcache_pool_blocks 5" if ours else text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: text[:40])
def test_a_foreign_answer_is_said_to_be_one(text):
    with answering(text) as url:
        for command in (["doctor", "--url", url], ["top", "--once", "--url", url]):
            done = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
            assert isinstance(done.exception, SystemExit), done.exception
            assert done.exit_code == 1
            assert "/ttlcache/programs is not ttlcache's" in done.output


def test_our_own_answer_is_read():
    row = {"program": "p", "turns": 1, "running": 0, "tool": "", "gap_s": None}
    row |= {"pins": 0, "pinned_blocks": 0, "ttl_left_s": None}
    text = json.dumps({"engines": [{"programs": [row]}, {"gauges": {"x": 1}}]})
    with answering(text) as url:
        done = CliRunner().invoke(app, ["top", "--once", "--url", url])
        assert done.exit_code == 0, done.output
        assert [
            f.text for f in findings("{}", url) if f.what == "server" and f.state == BAD
        ] == ["retention has turned itself off: see its log"] * 2


@pytest.mark.parametrize("url", ["http://x:abc", "nonsense", "http://x\n"])
def test_a_url_that_is_none_is_said_to_be_none(url):
    assert states(url=url)["server"] == BAD
    done = CliRunner().invoke(app, ["top", "--once", "--url", url])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)


def test_the_exit_status_is_the_verdict():
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    failed = CliRunner().invoke(app, ["doctor", "--config", '{"polcy": 1}'])
    assert failed.exit_code == 1
    assert "did you mean" in failed.output


PLUGINS = ("server module", "L2 adapter", "storage plugin")
MODULE = '{"module_path": "ttlcache_lmcache.server_module", "config": %s}'
ADAPTER = (
    '{"type": "plugin", "module_path": "ttlcache_lmcache.l2_adapter", '
    '"class_name": "%s", "adapter_params": {"path": "%s", "disk_bytes": 1000}}'
)
YAML = """
storage_plugins: ["{name}"]
pre_caching_hash_algorithm: {hash}
extra_config:
  storage_plugin.ours.module_path: ttlcache_lmcache.storage_plugin
  storage_plugin.ours.class_name: TTLStoragePlugin
  storage_plugin.ours.path: {path}
  storage_plugin.ours.disk_bytes: 1000
"""


def lmcache_texts(given: str) -> dict[str, tuple[str, str]]:
    pytest.importorskip("lmcache", reason="LMCache is an extra")
    return {f.what: (f.state, f.text) for f in findings("{}", None, [given])}


def test_lmcaches_plugins_load_here():
    found = lmcache_texts("plugins")
    assert {what: found[what] for what in PLUGINS} == dict.fromkeys(
        PLUGINS, (OK, "loads")
    )
    assert found["LMCache version"][0] == OK


def test_what_lmcache_is_given_is_checked_as_it_is(tmp_path):
    good = lmcache_texts(MODULE % '{"max_ttl_s": 5.0}')
    assert good["--server-module config"][0] == OK
    state, text = lmcache_texts(MODULE % '{"max_ttl": 5.0}')["--server-module config"]
    assert (state, "did you mean 'max_ttl_s'" in text) == (BAD, True)
    for broken in ("{", "{}", '{"module_path": "ttlcache"}', MODULE % "3"):
        assert lmcache_texts(broken)["JSON"][0] == BAD, broken

    folder = tmp_path / "kv"
    good = lmcache_texts(ADAPTER % ("TTLL2Adapter", folder))
    assert good["--l2-adapter adapter_params"][0] == OK
    assert not folder.exists()
    assert lmcache_texts(ADAPTER % ("Other", folder))["JSON"][0] == BAD
    folder.write_text("a file")
    for place in (folder, folder / "below"):
        found = lmcache_texts(ADAPTER % ("TTLL2Adapter", place))
        state, text = found["--l2-adapter adapter_params"]
        assert (state, "writable folder" in text) == (BAD, True)


def test_a_yaml_that_lmcache_would_go_on_without_is_bad(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    path = tmp_path / "lmcache.yaml"
    settings = {"name": "ours", "hash": "sha256_cbor", "path": tmp_path / "kv"}
    path.write_text(YAML.format(**settings))
    assert lmcache_texts(str(path))["storage_plugins extra_config"][0] == OK
    for wrong, reason in (
        ({"name": "other"}, "storage_plugins is ['other']"),
        ({"hash": "builtin"}, "sha256_cbor"),
    ):
        path.write_text(YAML.format(**(settings | wrong)))
        state, text = lmcache_texts(str(path))[str(path)]
        assert (state, reason in text) == (BAD, True)
    path.write_text("- no\n- mapping\n")
    assert lmcache_texts(str(path))[str(path)][0] == BAD
    absent = str(tmp_path / "absent.yaml")
    assert lmcache_texts(absent)[absent][0] == BAD


@pytest.mark.parametrize("worker", ["worker-0", "worker-3"])
def test_a_workers_folder_that_is_taken_is_seen(tmp_path, worker):
    kv, where = tmp_path / "kv", "storage_plugins extra_config"
    path = tmp_path / "lmcache.yaml"
    path.write_text(YAML.format(name="ours", hash="sha256_cbor", path=kv))
    for folder in ("worker-0", worker):
        disk_index.unlock_folder(disk_index.lock_folder(kv / folder))
    assert lmcache_texts(str(path))[where][0] == OK
    engine = disk_index.lock_folder(kv / worker)
    state, text = lmcache_texts(str(path))[where]
    disk_index.unlock_folder(engine)
    assert state == BAD
    assert f"{worker}'" in text
    assert "no other process" in text


def test_an_lmcache_that_was_not_tested_is_bad_unless_allowed(monkeypatch):
    from ttlcache_lmcache import compat as lmcache_compat

    monkeypatch.setattr(lmcache_compat, "lmcache_version", lambda: "0.9.0")
    assert lmcache_texts("plugins")["LMCache version"][0] == BAD
    allowed = lmcache_texts(MODULE % '{"allow_untested_lmcache": true}')
    assert allowed["LMCache version"] == (OK, "0.9.0, not tested, but allowed")


def test_lmcaches_plugins_need_no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert states()["vllm"] == BAD
    assert states(lmcache="127.0.0.1:1")["vllm"] == BAD
    assert states(lmcache="plugins")["vllm"] == NOTE


def test_without_lmcache_an_address_is_still_reached(monkeypatch):
    from ttlcache_lmcache import compat as lmcache_compat

    monkeypatch.setattr(lmcache_compat, "lmcache_version", lambda: None)
    assert states(lmcache="127.0.0.1:1")["LMCache version"] == NOTE
    assert states(lmcache="plugins")["LMCache version"] == BAD
