"""deploy/: linted, valid by schema, and every flag known to the program it is for."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from bench.compare.fleet.router import SETTINGS, STICKY_IDLE
from bench.surface.vllm_moved import find
from tests.commands import output_of
from tests.test_monitoring import metric_labels, names_in
from ttlcache.cli.main import app
from ttlcache.config import load_config

DEPLOY = Path(__file__).parents[1] / "deploy"
FILES = sorted([*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")])
#: A custom resource, and kustomize's own: the Kubernetes schemas have neither.
NO_SCHEMA = {"ScaledObject", "Kustomization"}
KUBERNETES = [
    (path.name, document)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
HELM = {p.stem: yaml.safe_load(p.read_text()) for p in (DEPLOY / "helm").glob("*")}


def manifest(file: str, kind: str) -> dict[str, Any]:
    (found,) = [d for where, d in KUBERNETES if where == file and d["kind"] == kind]
    return found


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]["spec"]


def name(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_yaml_is_clean(path):
    config = YamlLintConfig(file=str(DEPLOY / ".yamllint"))
    problems = list(linter.run(path.read_text(), config, str(path)))
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("file", "document"),
    [pair for pair in KUBERNETES if pair[1]["kind"] not in NO_SCHEMA],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_manifests_are_valid(file, document):
    kubernetes_validate.validate(document, "1.34", strict=True)


def test_kustomization_names_files_that_exist():
    kustomization = manifest("kustomization.yaml", "Kustomization")
    named = set(kustomization["resources"]) | {"keda.yaml", "kustomization.yaml"}
    assert named == {file for file, _ in KUBERNETES}


def test_compose_mounts_files_that_exist():
    folder = DEPLOY / "compose"
    mounts = [
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", ())
    ]
    for source in mounts:
        if source.startswith("."):
            assert (folder / source).resolve().exists(), source
        else:
            assert source in COMPOSE["volumes"]
    build = COMPOSE["services"]["lmcache"]["build"]
    assert ((folder / build["context"]).resolve() / build["dockerfile"]).exists()


# --- flags -------------------------------------------------------------------


def containers() -> Iterator[tuple[str, list[str]]]:
    """Where it is, and its whole command line."""
    for key, service in COMPOSE["services"].items():
        if "command" in service:
            yield f"compose/{key}", [*service["entrypoint"], *service["command"]]
    for file, document in KUBERNETES:
        template = document.get("spec", {}).get("template", {})
        for container in template.get("spec", {}).get("containers", ()):
            yield f"kubernetes/{file}", [*container["command"], *container["args"]]
    for container in HELM["llm-d"]["decode"]["containers"]:
        yield "helm/llm-d", [*container["command"], *container["args"]]
    for model in HELM["production-stack"]["servingEngineSpec"]["modelSpec"]:
        arguments = model["vllmConfig"]["extraArgs"]
        yield "helm/production-stack", ["vllm", "serve", model["modelURL"], *arguments]


COMMANDS = list(containers())


def _of(program: str) -> list[Any]:
    found = [
        pytest.param([filled(word) for word in words[1:]], id=where)
        for where, words in COMMANDS
        if words[0] == program
    ]
    assert found
    return found


def filled(word: str) -> str:
    """Variables as compose replaces them."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)


@pytest.mark.parametrize("words", _of("vllm"))
def test_vllm_knows_its_flags(words):
    pytest.importorskip("vllm")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert words[0] == "serve"
    arguments = find("make_arg_parser")(FlexibleArgumentParser()).parse_args(words[1:])
    transfer = arguments.kv_transfer_config
    assert transfer.kv_connector == "TTLConnector"
    load_config(transfer.kv_connector_extra_config)


@pytest.mark.parametrize("words", _of("ttlcache"))
def test_ttlcache_knows_its_flags(words):
    if words[0] == "front":
        command = typer.main.get_command(app).commands["front"]
        context = command.make_context("front", words[1:])
        assert context.params["upstream"].endswith(":30000")
        return
    pytest.importorskip("lmcache")
    printed = output_of(app, *words, "--print-only")
    # By default LMCache's HTTP interface, which has health and metrics, is for its host
    # alone.
    options = dict(pairwise(shlex.split(printed.strip().splitlines()[-1])))
    assert (options["--http-host"], options["--http-port"]) == ("0.0.0.0", "8090")


@pytest.mark.parametrize("words", _of("vllm-router"))
def test_the_router_knows_its_flags(words):
    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, exclude_host_port=False)
    found = RouterArgs.from_cli_args(parser.parse_args(words))
    assert found.policy == "sticky_least_loaded"
    if not found.service_discovery:
        assert found.worker_urls == ["http://vllm-0:8000", "http://vllm-1:8000"]


def test_the_router_has_the_settings_that_were_tried():
    """Those of the benches, which tests/front/test_routing.py runs with."""
    containers = pod_of(manifest("router.yaml", "Deployment"))["containers"]
    (router,) = [c for c in containers if c["name"] == "router"]
    assert {e["name"]: e["value"] for e in router["env"]} == STICKY_IDLE
    compose = COMPOSE["services"]["router"]
    assert compose["environment"] == STICKY_IDLE
    pairs = zip(SETTINGS[::2], SETTINGS[1::2], strict=True)
    settings = {f"{name}={value}" for name, value in pairs}
    for words in (router["args"], compose["command"]):
        assert settings <= set(words)


def test_clients_reach_the_front_and_not_the_router():
    published = {
        name: str(port)
        for name, service in COMPOSE["services"].items()
        for port in service.get("ports", ())
    }
    assert "router" not in published
    everywhere = {n for n, p in published.items() if not p.startswith("127.0.0.1:")}
    assert everywhere == {"front"}
    (port,) = manifest("router.yaml", "Service")["spec"]["ports"]
    named = {
        (container["name"], exposed["name"])
        for container in pod_of(manifest("router.yaml", "Deployment"))["containers"]
        for exposed in container["ports"]
    }
    assert ("front", port["targetPort"]) in named


def test_what_stands_before_replicas_waits_for_turns_as_long_as_they_do():
    """A stream goes through all three: the first that is killed breaks it off."""
    router, vllm = (
        pod_of(manifest(file, "Deployment")).get("terminationGracePeriodSeconds", 30)
        for file in ("router.yaml", "vllm.yaml")
    )
    assert router >= vllm
    stops = {
        key: COMPOSE["services"][key].get("stop_grace_period", "10s")
        for key in ("vllm-0", "router", "front")
    }
    assert len(set(stops.values())) == 1, stops


def test_replicas_and_lmcache_agree_on_the_port():
    for where, words in COMMANDS:
        line = " ".join(words)
        if '"lower_tier"' in line:
            assert '"lmcache.mp.port": 5555' in line, where
        if words[:2] == ["ttlcache", "serve-tiers"]:
            assert "--port=" not in line or "--port=5555" in line, where


def test_compose_s_prometheus_scrapes_ports_that_are_served():
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    targets = {
        target
        for job in config["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert targets == {"vllm-0:8000", "vllm-1:8000", "router:29000", "lmcache:8090"}
    assert {target.split(":")[0] for target in targets} <= COMPOSE["services"].keys()


def test_nobody_but_replicas_and_prometheus_reaches_lmcache():
    """It unpickles what it is sent, and its HTTP interface asks for no password."""
    pod = manifest("lmcache.yaml", "DaemonSet")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert not any("hostPort" in port for port in container["ports"])
    policy = manifest("lmcache.yaml", "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert allowed == {port["name"] for port in container["ports"]}
    assert all(rule["from"] for rule in policy["ingress"])
    vllm = manifest("vllm.yaml", "Deployment")
    (replicas,) = policy["ingress"][0]["from"]
    labels = vllm["spec"]["template"]["metadata"]["labels"]
    assert replicas["podSelector"]["matchLabels"] == labels
    # Another host's would share no memory.
    service = manifest("lmcache.yaml", "Service")
    assert service["spec"]["internalTrafficPolicy"] == "Local"


def test_keda_asks_for_metrics_that_exist():
    scaled = manifest("keda.yaml", "ScaledObject")
    names = {d["metadata"]["name"] for _, d in KUBERNETES if d["kind"] == "Deployment"}
    assert scaled["spec"]["scaleTargetRef"]["name"] in names
    asked: set[str] = set()
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["type"] == "prometheus"
        assert float(trigger["metadata"]["threshold"]) > 0
        asked |= names_in(trigger["metadata"]["query"])
    assert asked <= metric_labels().keys() | {"vllm:prompt_tokens_total"}
    assert {"ttlcache_waiting_programs", "ttlcache_pinned_blocks"} <= asked


def test_the_image_keeps_its_vllm_and_what_that_needs():
    """LMCache beside an installed vLLM, in a pip command that does not name it, takes
    versions that suit LMCache alone."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    version = re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", text, re.MULTILINE)[1]
    (install,) = re.findall(r"pip install (.*?)&&", text, re.DOTALL)
    assert f"'vllm=={version}'" in install


def test_no_image_is_unpinned():
    texts = [path.read_text() for path in [*FILES, DEPLOY / "docker" / "Dockerfile"]]
    assert not re.search(r":latest\b", "\n".join(texts))
    for service in COMPOSE["services"].values():
        assert ":" in service["image"]
