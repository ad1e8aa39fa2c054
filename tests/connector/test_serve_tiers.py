"""`ttlcache serve-tiers` and the settings that reach LMCache's connector."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.distributed import config as lmcache_config
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.mp_observability.config import add_observability_args
from lmcache.v1.multiprocess.config import (
    add_http_frontend_args,
    add_mp_server_args,
    parse_args_to_http_frontend_config,
)
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from typer.testing import CliRunner

from ttlcache.cli.main import app
from ttlcache.config import load_config
from ttlcache.errors import ConfigError
from ttlcache_connector.cli import serve_tiers as serve_tiers_cli
from ttlcache_connector.engine import requirements
from ttlcache_connector.lmcache_server.launch import TierOptions
from ttlcache_connector.tiers.lmcache import client
from ttlcache_lmcache.l2_adapter import TTLL2Adapter
from ttlcache_lmcache.store import disk_index


@pytest.fixture
def serve_tiers():
    return lambda *args: CliRunner().invoke(app, ["serve-tiers", *args])


@pytest.fixture
def never_runs(monkeypatch):
    monkeypatch.setattr(serve_tiers_cli, "_run", lambda *_: pytest.fail("ran"))


@pytest.fixture
def printed(serve_tiers):
    """What it would give to vLLM, and the server's command line."""

    def ask(*args: str) -> tuple[dict[str, Any], list[str]]:
        done = serve_tiers("--print-only", *args)
        assert done.exit_code == 0, done.output
        flag = re.search(r"--kv-transfer-config '(.*)'", done.output)[1]
        return json.loads(flag), shlex.split(done.output.strip().splitlines()[-1])

    return ask


def test_it_prints_a_flag_that_vllm_takes(printed, tmp_path):
    transfer, command = printed(
        *("--port", "7001", "--host", "0.0.0.0", "--disk", str(tmp_path)),
        *("--", "--separate-object-groups"),
    )
    assert transfer["kv_connector"] == "TTLConnector"
    extra = transfer["kv_connector_extra_config"]
    assert load_config(extra).lower_tier == "lmcache"
    assert extra["lmcache.mp.port"] == 7001
    assert extra["lmcache.mp.host"] == "tcp://127.0.0.1"
    assert command[command.index("--port") + 1] == "7001"
    disk = json.loads(command[command.index("--l2-adapter") + 1])
    assert disk["class_name"] == "TTLL2Adapter"  # LMCache's own verify nothing
    assert disk["adapter_params"]["path"] == str(tmp_path)
    assert command[-1] == "--separate-object-groups"
    assert "--l2-adapter" not in TierOptions().command()


def test_retention_loads_the_module_that_is_told_deadlines(printed):
    def modules(*args: str) -> list[str]:
        _, command = printed(*args)
        flags = itertools.pairwise(command)
        specs = [json.loads(text) for flag, text in flags if flag == "--server-module"]
        return [spec["module_path"] for spec in specs]

    assert modules() == ["ttlcache_connector.lmcache_module"]
    assert modules("--retention")[1:] == ["ttlcache_lmcache.server_module"]


def test_an_untested_pair_is_refused(serve_tiers, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.9")
    done = serve_tiers("--print-only")
    assert done.exit_code == 1
    assert "LMCache 0.9.9" in done.output
    assert "--allow-untested" in done.output
    assert serve_tiers("--print-only", "--allow-untested").exit_code == 0


def missing(name: str = "vllm") -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_what_is_not_there_is_named_with_what_to_install(serve_tiers, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(requirements, "vllm_version", missing)
        done = serve_tiers("--print-only")
    assert done.exit_code == 1
    assert "ttlcache[vllm,lmcache]" in done.output
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="one pip command"):
        requirements.check_lmcache_tier(allow_untested=False)


def test_the_memory_of_a_server_that_runs_is_left_alone(serve_tiers, never_runs):
    """Scenario: the command is given twice; new workers still find the first one's."""
    with socket.create_server(("127.0.0.1", 0)) as running:
        port = running.getsockname()[1]
        segment = TierOptions(port=port).segment
        segment.touch(exist_ok=False)
        try:
            done = serve_tiers("--port", str(port))
            assert segment.exists()
        finally:
            segment.unlink()
    assert done.exit_code == 1
    assert f"127.0.0.1:{port} is in use" in done.output


def test_a_disk_in_use_is_said(serve_tiers, never_runs, monkeypatch, tmp_path):
    monkeypatch.setattr(serve_tiers_cli, "_is_taken", lambda host, port: False)
    with disk_index.lock_folder(tmp_path):
        done = serve_tiers("--port", "7", "--disk", str(tmp_path))
    assert done.exit_code == 1
    assert "--disk" in done.output
    assert "no other process uses" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--disk-gb", "5"), "say where with --disk"),
        (("--port", "7", "--cpu-gb", "1e6"), "GB available"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(serve_tiers, never_runs, words, told):
    done = serve_tiers(*words)
    assert (done.exit_code, done.output.count("error:")) == (1, 1)
    assert told in done.output


def test_memory_that_a_server_elsewhere_has_is_left_alone(
    serve_tiers, never_runs, monkeypatch
):
    """Scenario: two containers with one /dev/shm, each with the port for itself."""
    monkeypatch.setattr(serve_tiers_cli, "_is_taken", lambda host, port: False)
    options = TierOptions(port=9)
    with disk_index.lock_folder(options.segment.with_name(options.shm_name)):
        options.segment.touch(exist_ok=False)
        try:
            done = serve_tiers("--port", "9")
            assert options.segment.exists()
        finally:
            options.segment.unlink()
    assert done.exit_code == 1
    assert "--port" in done.output


def test_the_disk_is_what_lmcache_builds(tmp_path):
    """By its own parser and factory, with the size that was asked for."""
    folder = tmp_path / "kv"
    storage, _ = configured(TierOptions(disk=folder, disk_gb=0.5))
    (config,) = storage.l2_adapter_config.adapters
    adapter = create_l2_adapter(config)
    try:
        assert isinstance(adapter, TTLL2Adapter)
        assert adapter.get_usage().total_capacity_bytes == 500_000_000
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        adapter.close()


def test_little_shared_memory_is_said_before_the_start(serve_tiers, monkeypatch):
    monkeypatch.setattr(serve_tiers_cli, "_run", lambda options, lock_fd: 0)
    monkeypatch.setattr(serve_tiers_cli, "_is_taken", lambda host, port: False)
    room = SimpleNamespace(free=2**26)  # docker's default
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    assert "has 0.1 GB free" in serve_tiers("--port", "7", "--cpu-gb", "1").output
    assert "warning" not in serve_tiers("--port", "7", "--cpu-gb", "0.05").output


SERVER = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("asked to end", flush=True))
print("runs", flush=True)
deadline = time.monotonic() + 1.0
while time.monotonic() < deadline:
    time.sleep(0.05)
"""
PARENT = """
import sys
import ttlcache.cli
from ttlcache_connector.lmcache_server.launch import TierOptions
from ttlcache_connector.cli.serve_tiers import _run

class Stub(TierOptions):
    def command(self):
        return [sys.executable, "-c", sys.argv[1]]

sys.exit(_run(Stub(port=0), 1))
"""


def test_ctrl_c_reaches_the_server_once():
    """A second one makes it end at once, with what is on its way to the disk."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, SERVER],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout.readline() == "runs\n"
        os.killpg(parent.pid, signal.SIGINT)  # what a terminal does
        assert parent.stdout.read() == "asked to end\n"
        assert parent.wait() == 0


def configured(options: TierOptions) -> tuple[Any, Any]:
    """What LMCache's own parsers make of the command line: storage and HTTP."""
    parser = argparse.ArgumentParser()
    add_http_frontend_args(parser)
    add_mp_server_args(parser)
    add_storage_manager_args(parser)
    add_observability_args(parser)
    command = options.command()
    arguments = parser.parse_args(command[command.index("server") + 1 :])
    http = parse_args_to_http_frontend_config(arguments)
    return parse_args_to_config(arguments), http


def test_workers_share_lmcaches_memory_where_it_could_be_pinned(monkeypatch):
    """LMCache grows pinned memory lazily by default, and then it shares none of it."""
    gpu_host = SimpleNamespace(is_pin_supported=True)
    monkeypatch.setattr(lmcache_config, "current_device_spec", gpu_host)
    options = TierOptions(port=7)
    storage, _ = configured(options)
    pool = MPCacheServerContext._compute_shm_pool_info(storage)
    assert pool["shm_name"] == "lmcache_l1_pool_ttlcache_7"
    assert options.segment == Path("/dev/shm", pool["shm_name"])
    assert pool["pool_size"] == pytest.approx(20e9, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "host", "port"),
    [
        (TierOptions(), "127.0.0.1", 8090),
        (TierOptions(http_host="0.0.0.0", http_port=7), "0.0.0.0", 7),
    ],
)
def test_lmcache_s_own_interface_is_for_this_host_unless_asked(options, host, port):
    """It empties the cache and shows the environment to whoever asks."""
    _, http = configured(options)
    assert (http.http_host, http.http_port) == (host, port)


def kv_groups(count: int) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace()] * count)


def extra_of(groups: int = 1, /, **keys: object) -> dict[str, object]:
    transfer = SimpleNamespace(kv_connector_extra_config=dict(keys))
    vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    inner = client._inner_config(vllm_config, kv_groups(groups))
    assert transfer.kv_connector_extra_config == keys  # ours stays as it was
    return inner.kv_transfer_config.kv_connector_extra_config


def test_lmcache_gets_its_own_keys_and_defaults_that_fit_agents():
    own = {"lmcache.mp.port": 7, "lmcache.mp.mq_timeout": 9.0}
    extra = extra_of(**own)
    assert own.items() <= extra.items()
    assert extra["lmcache.mp.save_decode_cache"] is True
    assert extra["lmcache.mp.lazy_offload"] is True
    with pytest.raises(ConfigError, match=r"lazy_offload.*'demote' decides"):
        extra_of(**{"lmcache.mp.lazy_offload": False})


def test_a_server_that_copies_by_itself_is_not_soon_taken_for_dead():
    """It may go on, into blocks that others have by then: LMCache's 10 s stay."""
    key, by_server = (
        "lmcache.mp.heartbeat_interval",
        {"lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    )
    assert extra_of()[key] == client.HEARTBEAT_S
    assert key not in extra_of(2)
    assert key not in extra_of(**by_server)
    assert extra_of(2, **{key: 3.0})[key] == 3.0


def test_a_key_that_lmcache_does_not_read_is_named(monkeypatch):
    lines = []
    monkeypatch.setattr(client.log, "warning", lambda text, *a: lines.append(text % a))
    extra_of(**{"lmcache.mp.prot": 7, "lmcache.chunk_size": 8, "lmcache.mp.port": 7})
    assert lines == [
        "ttlcache: LMCache does not read 'lmcache.mp.prot'; "
        "did you mean 'lmcache.mp.port'?",
        "ttlcache: LMCache does not read 'lmcache.chunk_size'",
    ]


def test_no_server_is_an_error_that_says_what_to_start(monkeypatch):
    def refuse(*args: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(client, "LMCacheMPConnector", refuse)
    transfer = SimpleNamespace(kv_connector_extra_config={"lmcache.mp.port": 7})
    with pytest.raises(ConfigError, match=r":7; start it first.*serve-tiers"):
        client.connect(None, SimpleNamespace(kv_transfer_config=transfer), kv_groups(1))
