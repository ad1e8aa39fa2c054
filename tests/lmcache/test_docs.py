"""What docs/lmcache.md prints is what the plugins accept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ttlcache_lmcache import hints
from ttlcache_lmcache.config import (
    PluginConfig,
    ServerModuleConfig,
    TierConfig,
    load,
)
from ttlcache_lmcache.diagnose import diagnose
from ttlcache_lmcache.findings import BAD, OK, Finding
from ttlcache_lmcache.store import disk_index

TEXT = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text()


def table(heading: str) -> dict[str, tuple[str, str]]:
    section = TEXT.split(heading, 1)[1]
    found = re.search(r"^\| key \|.*\n\|.*\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert found is not None
    rows = ([c.strip() for c in row.split("|")[1:-1]] for row in found[1].splitlines())
    return {key.strip("`"): (default, text) for key, default, text in rows}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("## Server module", ServerModuleConfig), ("## L2 adapter", TierConfig)],
)
def test_the_tables_are_the_configuration(
    heading: str, kind: type[PluginConfig]
) -> None:
    documented = table(heading)
    assert set(documented) == set(kind.model_fields)
    for name, field in kind.model_fields.items():
        default, text = documented[name]
        assert text == field.description
        if field.is_required():
            assert default == "required"
        else:
            value = field.get_default(call_default_factory=True)
            assert json.loads(default.strip("`")) == value


def test_every_printed_flag_is_valid(tmp_path: Path) -> None:
    (module,) = re.findall(r"--server-module '(.*?)'", TEXT)
    spec = json.loads(module)
    assert spec["module_path"] == "ttlcache_lmcache.server_module"
    load(ServerModuleConfig, spec["config"], "docs")
    (adapter,) = re.findall(r"--l2-adapter '(.*?)'", TEXT)
    load(TierConfig, json.loads(adapter)["adapter_params"], "docs")
    pairs = re.findall(r"storage_plugin\.ttlcache\.(\w+): (\S+)", TEXT)
    own = {k: v for k, v in pairs if k not in ("module_path", "class_name")}
    values: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in own.items()}
    load(TierConfig, values, "docs")
    (example,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert hints.decode(example.encode())[0].ttl_s == 12.5


def verdicts(findings: list[Finding]) -> dict[str, bool]:
    return {finding.what: finding.state == OK for finding in findings}


def test_diagnose_finds_nothing_wrong(tmp_path: Path) -> None:
    pytest.importorskip("lmcache", reason="LMCache is an extra")
    tier = {"path": str(tmp_path), "disk_bytes": 1}
    found = diagnose(server_module={}, l2_adapter=tier, storage_plugin=tier)
    assert [f for f in found if f.state != OK] == []
    assert len(found) == 7


@pytest.mark.parametrize("worker", ["worker-0", "worker-3"])
def test_diagnose_sees_that_a_workers_folder_is_taken(
    tmp_path: Path, worker: str
) -> None:
    pytest.importorskip("lmcache", reason="LMCache is an extra")
    settings = {"path": str(tmp_path / "kv"), "disk_bytes": 1}
    for folder in ("worker-0", worker):
        disk_index.unlock_folder(disk_index.lock_folder(tmp_path / "kv" / folder))
    assert all(found.state == OK for found in diagnose(storage_plugin=settings))
    engine = disk_index.lock_folder(tmp_path / "kv" / worker)
    (wrong,) = [f for f in diagnose(storage_plugin=settings) if f.state == BAD]
    disk_index.unlock_folder(engine)
    assert wrong.what == "storage_plugins extra_config"
    assert f"{worker}'" in wrong.text
    assert "no other process" in wrong.text


def test_diagnose_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    findings = diagnose(
        server_module={"max_ttl": 1.0},
        l2_adapter={"path": str(tmp_path / "file"), "disk_bytes": 1},
    )
    texts = {f.what: f.text for f in findings if f.state == BAD}
    assert "did you mean 'max_ttl_s'" in texts["--server-module config"]
    assert "writable folder" in texts["--l2-adapter adapter_params"]

    monkeypatch.setattr("ttlcache_lmcache.compat.lmcache_version", lambda: "0.7.0")
    assert verdicts(diagnose())["LMCache version"] is False
    monkeypatch.setattr("ttlcache_lmcache.compat.lmcache_version", lambda: None)
    assert verdicts(diagnose()) == {"LMCache version": False}
