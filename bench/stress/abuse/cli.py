"""`python -m bench abuse`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.command import Folders, one_of, write_json
from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer
from bench.stress.abuse.http import AbuseResult
from bench.stress.soak.watch import MAX_NEW_LINES
from bench.tables import Check, checks_table, equal, table
from ttlcache.cli.command import option

#: Agents beside abusive clients, over the same agents and clients on plain vLLM; also
#: the other tenant's mean JCT under a flood over that without it.
MAX_JCT_RATIO, MAX_P99_RATIO, MAX_WAIT_RATIO = 1.2, 1.5, 2.0
#: Of API server and engine core; 16 MiB of it are vLLM's own.
MAX_GROWTH_MIB = 64.0
#: What the other tenant's hit share may lose over HTTP.
MAX_HIT_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class AbuseOptions(Folders):
    """Which clients, under which policies."""

    patterns: str = option("", "Of clients, by name, separated by ;. Default: all.")
    policies: tuple[str, ...] = option(
        ("adaptive", "cachettl"),
        "Retention policies that the patterns are played with.",
    )
    sessions: int = option(10_000, "Sessions of the abusing client.", min=200)
    policy: str = option("cachettl", "Retention policy under the flood.")
    http: bool = option(True, "Also against a real server.", "--http/--no-http")
    out: Path = Path("out/abuse")


def abuse(options: AbuseOptions, console: Console) -> int:
    """What agents notice of clients that harm others, against plain vLLM.

    First every pattern of clients in virtual time; then one client that wants thousands
    of sessions kept for ever. Exit status 1: agents wait too long, memory or /metrics
    grow."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    sessions, policy, out = options.sessions, options.policy, options.out
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in options.patterns.split(";") if name]
    rows, found = _pattern_rows(names, options.policies, console)
    more, results = _flood_rows(sessions, policy)
    results["patterns"] = found
    rows += more
    if options.http:
        real, results["servers"] = _real_rows(options.policies, out, options.model)
        noticed = _over_http(sessions, policy, out, options.model)
        rows += [*real, *_http_rows(noticed)]
        results["http"] = asdict(noticed)
    console.print(checks_table(f"{sessions:,} sessions, policy {policy}", rows))
    write_json(out / "abuse.json", results)
    return 0 if all(row.ok for row in rows) else 1


def _pattern_rows(
    names: Sequence[str], policies: Sequence[str], console: Console
) -> tuple[list[Check], list[dict[str, object]]]:
    """Prints a line a pattern and number of tenants; one verdict a policy."""
    # vLLM is slow to import: only where it runs.
    from bench.stress.abuse.patterns import patterns
    from bench.stress.abuse.play import Load, compare

    load = Load()
    known = patterns(load.seats)
    for name in names:
        one_of("pattern", name, known)
    found, rows = [], []
    for name in names or known:
        for tenants in (1, 2):
            each = compare(known[name], load, tenants=tenants, policies=policies)
            found.append({"pattern": name, "tenants": tenants} | each.to_json())
            rows.append([name, str(tenants), *each.cells()])
    columns = ("clients", "tenants", "vLLM: JCT, longest wait", *policies)
    view = table("agents beside clients, over plain vLLM", columns, rows)
    view.caption = "mean JCT, p99 JCT, longest wait of a turn"
    console.print(view)
    return [_pattern_verdict(policy, found) for policy in policies], found


def _pattern_verdict(policy: str, found: Sequence[dict[str, Any]]) -> Check:
    limits = (MAX_JCT_RATIO, MAX_P99_RATIO, MAX_WAIT_RATIO)
    broken = [
        f"{each['pattern']} ({each['tenants']})"
        for each in found
        if any(a > b for a, b in zip(each[policy]["ratios"], limits, strict=True))
        or each[policy]["hook_errors"]
    ]
    worst = [max(each[policy]["ratios"][i] for each in found) for i in range(3)]
    return Check(
        f"agents beside clients, {policy}: mean JCT, p99, longest wait over vLLM's",
        not broken,
        ", ".join(f"{ratio:.2f}" for ratio in worst)
        + (f"; broken: {', '.join(broken)}" if broken else ""),
        ", ".join(f"{limit:g}" for limit in limits),
    )


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


def _real_rows(
    policies: Sequence[str], out: Path, model: Path
) -> tuple[list[Check], dict[str, object]]:
    """Clients with constant ids, three times as many as seats, on real servers."""
    from bench.stress.abuse.patterns import Pattern, constant_ids
    from bench.stress.abuse.play import Comparison
    from bench.stress.abuse.servers import play_on

    built, seats = tiny_model.build(model), 16
    clients = Pattern(constant_ids, 3 * seats)
    waits = {}
    for policy in ("", *policies):
        options = replace(server_options(policy), num_blocks=160, max_num_seqs=seats)
        if not policy:
            options = replace(options, kv_transfer_config=None)
        log_path = out / f"constant-ids-{policy or 'vllm'}.log"
        with VLLMServer(built, options, log_path) as server:
            waits[policy] = play_on(server, clients)
    found = Comparison(waits.pop(""), waits)
    rows = [
        Check(
            f"the same on real servers, {3 * seats} constant ids, {policy}",
            ratios[0] <= MAX_JCT_RATIO and ratios[2] <= MAX_WAIT_RATIO,
            ", ".join(f"{ratio:.2f}" for ratio in ratios)
            + f" ({found.cells()[0]} on vLLM)",
            f"{MAX_JCT_RATIO:g}, -, {MAX_WAIT_RATIO:g}",
        )
        for policy in policies
        for ratios in [found.ratios(policy)]
    ]
    return rows, found.to_json()


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
