"""What docs/lmcache.md prints is what the plugins accept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ttlcache_lmcache import hints
from ttlcache_lmcache.config import DiskConfig, PluginConfig, ServerModuleConfig, load

TEXT = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text()


def table(heading: str) -> dict[str, tuple[str, str]]:
    section = TEXT.split(heading, 1)[1]
    found = re.search(r"^\| key \|.*\n\|.*\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert found is not None
    rows = ([c.strip() for c in row.split("|")[1:-1]] for row in found[1].splitlines())
    return {key.strip("`"): (default, text) for key, default, text in rows}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("## Server module", ServerModuleConfig), ("## L2 adapter", DiskConfig)],
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
    load(DiskConfig, json.loads(adapter)["adapter_params"], "docs")
    (example,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert hints.decode(example.encode())[0].ttl_s == 12.5
