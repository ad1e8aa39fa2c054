"""`python -m bench abuse`."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from bench.command import Folders, option, write_json
from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer
from bench.stress.abuse.http import AbuseResult
from bench.stress.soak.watch import MAX_NEW_LINES
from bench.tables import Check, checks_table, equal

#: The other tenant's mean JCT under a flood over that without it.
MAX_JCT_RATIO = 1.2
#: Of API server and engine core; 16 MiB of it are vLLM's own.
MAX_GROWTH_MIB = 64.0
#: What the other tenant's hit share may lose over HTTP.
MAX_HIT_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class AbuseOptions(Folders):
    """How many sessions, under which policy."""

    sessions: int = option(10_000, "Sessions of the abusing client.", min=200)
    policy: str = option("cachettl", "Retention policy under the flood.")
    http: bool = option(True, "Also against a real server.", "--http/--no-http")
    out: Path = Path("out/abuse")


def abuse(options: AbuseOptions, console: Console) -> int:
    """One client that wants thousands of sessions kept for ever, and another tenant.

    In virtual time, then over HTTP. Exit status 1: the other one waits too long, memory
    or /metrics grow."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    sessions, policy, out = options.sessions, options.policy, options.out
    out.mkdir(parents=True, exist_ok=True)
    rows, results = _flood_rows(sessions, policy)
    if options.http:
        noticed = _over_http(sessions, policy, out, options.model)
        rows += _http_rows(noticed)
        results["http"] = asdict(noticed)
    console.print(checks_table(f"{sessions:,} sessions, policy {policy}", rows))
    write_json(out / "abuse.json", results)
    return 0 if all(row.ok for row in rows) else 1


def _flood_rows(sessions: int, policy: str) -> tuple[list[Check], dict[str, object]]:
    # vLLM is slow to import: only where it runs.
    from bench.stress.abuse.flood import ARMS, run_arm

    found = {arm: run_arm(arm, sessions, policy) for arm in ARMS}
    polite = found["polite"]
    rows = [
        Check(
            f"mean JCT of the other tenant, {arm} / polite",
            each.mean_jct_s <= MAX_JCT_RATIO * polite.mean_jct_s,
            f"{each.mean_jct_s / polite.mean_jct_s:.3f} ({each.mean_jct_s:.2f} s, "
            f"{polite.mean_jct_s:.2f} s; hits {each.hit_share:.0%}, "
            f"{polite.hit_share:.0%})",
            f"{MAX_JCT_RATIO:g}",
        )
        for arm, each in found.items()
        if arm != "polite"
    ]
    errors = sum(each.hook_errors for each in found.values())
    rows.append(equal("exceptions in hooks", errors, 0))
    kept = ("mean_jct_s", "programs", "hit_share", "peak_pinned_blocks", "hook_errors")
    return rows, {
        arm: {name: getattr(each, name) for name in kept} for arm, each in found.items()
    }


def server_options(policy: str) -> ServerOptions:
    """A server with a small pool and our connector."""
    return ServerOptions(
        num_blocks=320,
        max_model_len=4096,
        extra_env={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"},
        kv_transfer_config={
            "kv_connector": "TTLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"policy": policy},
        },
    )


def _over_http(sessions: int, policy: str, out: Path, model: Path) -> AbuseResult:
    from bench.stress.abuse import http

    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    built = tiny_model.build(model)
    with VLLMServer(built, server_options(policy), out / "server.log") as server:
        return http.abuse(server, sessions)


def _http_rows(found: AbuseResult) -> list[Check]:
    before, after = found.before, found.after
    grown_mib = after.rss_mib - before.rss_mib
    lost = found.hit_calm - found.hit_flooded
    return [
        equal("requests not answered", found.refused, 0),
        Check(
            "lines of /metrics",
            after.metrics_lines <= before.metrics_lines + MAX_NEW_LINES,
            f"{after.metrics_lines - before.metrics_lines:+,}",
            f"{MAX_NEW_LINES:+}",
        ),
        Check(
            "memory of API server and engine core",
            grown_mib <= MAX_GROWTH_MIB,
            f"{grown_mib:+.0f} MiB, to {after.rss_mib:,.0f} MiB",
            f"{MAX_GROWTH_MIB:+g} MiB",
        ),
        Check(
            "hits of the other tenant, alone and flooded",
            lost <= MAX_HIT_LOSS,
            f"{found.hit_calm:.0%}, {found.hit_flooded:.0%}",
            f"{MAX_HIT_LOSS:.0%} less",
        ),
        equal("exceptions in hooks", after.hook_errors, 0),
        equal("retention still on", after.retention_enabled, 1),
    ]
