"""`python -m bench abuse`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.serve import tiny_model
from bench.serve.server import ServerOptions, VLLMServer
from bench.stress.abuse.http import AbuseResult

#: Agents beside abusive clients, over the same agents and clients on plain vLLM; also
#: the other tenant's mean JCT under a flood over that without it.
MAX_JCT_RATIO, MAX_P99_RATIO, MAX_WAIT_RATIO = 1.2, 1.5, 2.0
#: Of API server and engine core; 16 MiB of it are vLLM's own.
MAX_GROWTH_MIB = 64.0
#: What the other tenant's hit share may lose over HTTP.
MAX_HIT_LOSS = 0.1


def abuse(
    patterns: Annotated[
        str, typer.Option(help="Of clients, by name, separated by ;. Default: all.")
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Retention policies that the patterns are played with.")
    ] = "adaptive,cachettl",
    sessions: Annotated[
        int, typer.Option(help="Sessions of the abusing client.", min=200)
    ] = 10_000,
    policy: Annotated[
        str, typer.Option(help="Retention policy under the flood.")
    ] = "cachettl",
    http: Annotated[
        bool, typer.Option("--http/--no-http", help="Also against a real server.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "out/abuse"
    ),
    model: Annotated[Path, typer.Option(help="Folder of the tiny model.")] = Path(
        "out/models/tiny"
    ),
) -> None:
    """What agents notice of clients that harm others, against plain vLLM.

    First every pattern of clients in virtual time; then one client that wants thousands
    of sessions kept for ever. Exit status 1: agents wait too long, memory or /metrics
    grow."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in patterns.split(";") if name]
    fair, found = _pattern_rows(names, policies.split(","), console)
    rows, results = _flood_rows(sessions, policy)
    results["patterns"] = found
    rows = fair + rows
    if http:
        real, results["servers"] = _real_rows(policies.split(","), out, model)
        rows += real
        noticed = _over_http(sessions, policy, out, model)
        rows += _http_rows(noticed)
        results["http"] = asdict(noticed)
    title = f"{sessions:,} sessions, policy {policy}"
    table = Table(title=title, title_justify="left")
    for name in ("", "", "found", "allowed"):
        table.add_column(name)
    for ok, name, value, allowed in rows:
        mark = "[green]ok[/]" if ok else "[red]FAILED[/]"
        table.add_row(mark, name, value, allowed)
    console.print(table)
    (out / "abuse.json").write_text(json.dumps(results, indent=1) + "\n")
    raise typer.Exit(0 if all(row[0] for row in rows) else 1)


Row = tuple[bool, str, str, str]


def _pattern_rows(
    names: Sequence[str], policies: Sequence[str], console: Console
) -> tuple[list[Row], list[dict[str, object]]]:
    """Prints a line a pattern and number of tenants; one verdict a policy."""
    # vLLM is slow to import: only where it runs.
    from bench.stress.abuse.patterns import patterns
    from bench.stress.abuse.play import Load, compare

    load = Load()
    known = patterns(load.seats)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"pattern {unknown[0]!r}: expected one of {', '.join(known)}"
        )
    table = Table(title="agents beside clients, over plain vLLM", title_justify="left")
    for name in ("clients", "tenants", "vLLM: JCT, longest wait", *policies):
        table.add_column(name, justify="left" if name == "clients" else "right")
    found = []
    for name in names or known:
        for tenants in (1, 2):
            each = compare(known[name], load, tenants=tenants, policies=policies)
            found.append({"pattern": name, "tenants": tenants} | each.to_json())
            table.add_row(name, str(tenants), *each.cells())
    table.caption = "mean JCT, p99 JCT, longest wait of a turn"
    console.print(table)
    rows = [_pattern_verdict(policy, found) for policy in policies]
    return rows, found


def _pattern_verdict(policy: str, found: Sequence[dict[str, Any]]) -> Row:
    limits = (MAX_JCT_RATIO, MAX_P99_RATIO, MAX_WAIT_RATIO)
    broken = [
        f"{each['pattern']} ({each['tenants']})"
        for each in found
        if any(a > b for a, b in zip(each[policy]["ratios"], limits, strict=True))
        or each[policy]["hook_errors"]
    ]
    worst = [max(each[policy]["ratios"][i] for each in found) for i in range(3)]
    return (
        not broken,
        f"agents beside clients, {policy}: mean JCT, p99, longest wait over vLLM's",
        ", ".join(f"{ratio:.2f}" for ratio in worst)
        + (f"; broken: {', '.join(broken)}" if broken else ""),
        ", ".join(f"{limit:g}" for limit in limits),
    )


def _flood_rows(sessions: int, policy: str) -> tuple[list[Row], dict[str, object]]:
    # vLLM is slow to import: only where it runs.
    from bench.stress.abuse.flood import ARMS, FloodOptions, run_arm

    options = FloodOptions(sessions=sessions, policy=policy)
    polite, *others = (run_arm(arm, options) for arm in ARMS)
    rows: list[Row] = [
        (
            each.mean_jct_s <= MAX_JCT_RATIO * polite.mean_jct_s,
            f"mean JCT of the other tenant, {each.arm} / polite",
            f"{each.mean_jct_s / polite.mean_jct_s:.3f} ({each.mean_jct_s:.2f} s, "
            f"{polite.mean_jct_s:.2f} s; hits {each.hit_share:.0%}, "
            f"{polite.hit_share:.0%})",
            f"{MAX_JCT_RATIO:g}",
        )
        for each in others
    ]
    errors = sum(each.hook_errors for each in (polite, *others))
    rows.append((errors == 0, "exceptions in hooks", f"{errors}", "0"))
    return rows, {each.arm: asdict(each) for each in (polite, *others)}


def _real_rows(
    policies: Sequence[str], out: Path, model: Path
) -> tuple[list[Row], dict[str, object]]:
    """Clients with constant ids, three times as many as seats, on real servers."""
    from bench.stress.abuse.patterns import ConstantIds
    from bench.stress.abuse.play import Comparison
    from bench.stress.abuse.servers import ServerLoad, play_on

    built, seats = tiny_model.build(model), 16
    waits = {}
    for policy in ("", *policies):
        options = replace(server_options(policy), num_blocks=160, max_num_seqs=seats)
        if not policy:
            options = replace(options, kv_transfer_config=None)
        log_path = out / f"constant-ids-{policy or 'vllm'}.log"
        with VLLMServer(built, options, log_path) as server:
            waits[policy] = play_on(server, ConstantIds(3 * seats), ServerLoad())
    found = Comparison(waits.pop(""), waits)
    rows = [
        (
            ratios[0] <= MAX_JCT_RATIO and ratios[2] <= MAX_WAIT_RATIO,
            f"the same on real servers, {3 * seats} constant ids, {policy}",
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


def _http_rows(found: AbuseResult) -> list[Row]:
    before, after = found.before, found.after
    grown_mib = after.rss_mib - before.rss_mib
    lost = found.hit_calm - found.hit_flooded
    return [
        (found.refused == 0, "requests not answered", f"{found.refused}", "0"),
        (
            after.metrics_lines == before.metrics_lines,
            "lines of /metrics",
            f"{before.metrics_lines} … {after.metrics_lines}",
            "constant",
        ),
        (
            grown_mib <= MAX_GROWTH_MIB,
            "memory of API server and engine core",
            f"{grown_mib:+.0f} MiB, to {after.rss_mib:,.0f} MiB",
            f"{MAX_GROWTH_MIB:+g} MiB",
        ),
        (
            lost <= MAX_HIT_LOSS,
            "hits of the other tenant, alone and flooded",
            f"{found.hit_calm:.0%}, {found.hit_flooded:.0%}",
            f"{MAX_HIT_LOSS:.0%} less",
        ),
        (
            after.hook_errors == 0 and after.retention_enabled == 1,
            "exceptions in hooks, retention",
            f"{after.hook_errors:g}, {'on' if after.retention_enabled else 'off'}",
            "0, on",
        ),
    ]
