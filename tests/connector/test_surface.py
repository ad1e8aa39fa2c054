"""vLLM's names and signatures, version by version, against what the connector uses.

The files in surface/ were read from the sources of each version (`make surface`); the
installed vLLM is read anew.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
import vllm
from packaging.specifiers import SpecifierSet

from bench.surface.extract import missing, reader, surface
from bench.surface.needs import HOOKS, USES
from ttlcache.errors import UnsupportedEngineError
from ttlcache_connector.connector import TTLConnector
from ttlcache_connector.engine import requirements
from ttlcache_connector.queue import ProgramQueue
from ttlcache_connector.role.metrics import TTLConnectorStats, TTLPromMetrics
from ttlcache_connector.scheduler import TTLScheduler

FOLDER = Path(__file__).parent / "surface"
VERSIONS = {
    state["version"]: state["names"]
    for state in (json.loads(path.read_text()) for path in FOLDER.glob("*.json"))
}
OURS = {
    "KVConnectorBase_V1": TTLConnector,
    "SupportsHMA": TTLConnector,
    "KVConnectorStats": TTLConnectorStats,
    "KVConnectorPromMetrics": TTLPromMetrics,
    "RequestQueue": ProgramQueue,
    "Scheduler": TTLScheduler,
}
CONNECTOR = Path(inspect.getfile(TTLConnector)).parent
INSTALLED = Path(vllm.__file__).parents[1]


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_each_version_has_every_name(version):
    assert missing(VERSIONS[version]) == []


def test_each_tested_minor_version_is_recorded():
    range_ = SpecifierSet(requirements.TESTED_VLLM)
    tested = {f"0.{n}" for n in range(200) if f"0.{n}.0" in range_}
    assert tested == {version.rpartition(".")[0] for version in VERSIONS}


def test_the_installed_vllm_has_every_name():
    found = surface(reader(INSTALLED))
    assert missing(found) == []
    # A release has one surface: what was recorded is what is installed.
    release = vllm.__version__.partition("+")[0]
    if release in VERSIONS:
        assert found == VERSIONS[release]


HOOK_NAMES = sorted(
    (where.partition("::")[2], name) for where, names in HOOKS.items() for name in names
)


@pytest.mark.parametrize("version", sorted(VERSIONS))
@pytest.mark.parametrize(("cls", "hook"), HOOK_NAMES)
def test_our_hooks_take_what_vllm_passes(version, cls, hook):
    theirs = VERSIONS[version][f"{cls}.{hook}"]
    ours = inspect.getattr_static(OURS[cls], hook)
    if theirs == "":
        assert isinstance(ours, property)
        return
    ours = getattr(ours, "__func__", ours)  # of a class method
    parameters = list(inspect.signature(ours).parameters.values())[1:]
    names = [
        {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        for p in parameters
    ]
    if "*args" in names and "**kwargs" in names:
        return  # handed on as they come
    assert names[: len(theirs)] == theirs
    assert all(p.default is not p.empty for p in parameters[len(theirs) :])


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_vllms_queue_asks_for_no_method_that_ours_lacks(version):
    abstract = set(VERSIONS[version]["RequestQueue:abstract"])
    assert abstract
    assert abstract <= set(vars(ProgramQueue))


@pytest.mark.parametrize(
    ("variable", "cls"),
    [("request", "Request"), ("block", "KVCacheBlock"), ("pool", "BlockPool")],
)
def test_the_table_names_everything_that_the_code_touches(variable, cls):
    used = {
        node.attr
        for folder in (".", "blocks", "engine", "role")
        for path in (CONNECTOR / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == variable)
            or (isinstance(node.value, ast.Attribute) and node.value.attr == variable)
        )
    }
    (listed,) = (names for where, names in USES.items() if where.endswith(f"::{cls}"))
    assert used
    assert used <= {name.partition("(")[0] for name in listed}


def test_a_rename_in_vllm_would_be_seen():
    real = reader(INSTALLED)

    def changed(path: str) -> str | None:
        text = real(path)
        if text is None or not path.startswith("vllm/v1/core/"):
            return text
        text = text.replace("def get_num_free_blocks", "def count_free_blocks")
        return text.replace("ordered_blocks", "blocks_in_order")

    assert missing(surface(changed)) == [
        "BlockPool.free_blocks(ordered_blocks)",
        "BlockPool.get_num_free_blocks",
    ]


@pytest.mark.parametrize(
    ("version", "good"),
    [
        *((v, False) for v in ("0.31.9", "0.34.0", "0.34rc1", "1.0.0")),
        *((v, True) for v in ("0.32.1+cpu", "0.33.0")),
    ],
)
def test_untested_versions_are_refused_by_name(monkeypatch, version, good):
    monkeypatch.setattr(requirements, "vllm_version", lambda: version)
    assert requirements.check_vllm(allow_untested=not good) == version
    if not good:
        with pytest.raises(UnsupportedEngineError) as caught:
            requirements.check_vllm(allow_untested=False)
        for part in (version, ">=0.32,<0.34", "allow_untested_vllm"):
            assert part in str(caught.value)
