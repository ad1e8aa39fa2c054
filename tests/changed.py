"""Which nightly tests the work under test has touched.

    python tests/changed.py

prints them, one file a line (`make test-touched` runs them).
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CONNECTOR = "connector/ttlcache_connector"
_LMCACHE = (
    f"{_CONNECTOR}/tiers/",
    f"{_CONNECTOR}/lmcache_server/",
    "connector/ttlcache_lmcache/",
)
#: Nightly tests -> the sources that only they see at work.
NIGHTLY = {
    "tests/core/test_mutations.py": ("ttlcache/",),
    "tests/e2e/test_benches.py": (
        "bench/compare/harness.py",
        "bench/compare/harness_clients.py",
        "bench/compare/settings.py",
        "bench/compare/validate.py",
        "bench/compare/step_fit.py",
        "connector/ttlcache_sim/steps/profile.py",
        "connector/ttlcache_sim/engine.py",
        f"{_CONNECTOR}/cli/profile.py",
        f"{_CONNECTOR}/cli/sweep.py",
    ),
    "tests/e2e/test_changed_prefix.py": (
        f"{_CONNECTOR}/http/",
        "ttlcache/programs/divergence.py",
    ),
    "tests/e2e/test_clients.py": ("ttlcache/toolcalls/",),
    "tests/e2e/test_cpu_tier_load.py": (f"{_CONNECTOR}/tiers/cpu/",),
    "tests/e2e/test_data_parallel.py": (f"{_CONNECTOR}/front/", f"{_CONNECTOR}/http/"),
    "tests/e2e/test_faults.py": (f"{_CONNECTOR}/faults.py", f"{_CONNECTOR}/role/"),
    "tests/e2e/test_fleet.py": (f"{_CONNECTOR}/front/", "bench/compare/fleet/"),
    "tests/e2e/test_process.py": (
        f"{_CONNECTOR}/role/",
        "ttlcache/estimators/",
        "ttlcache/telemetry/",
    ),
    "tests/e2e/test_survival.py": (f"{_CONNECTOR}/http/", *_LMCACHE),
    "tests/e2e/test_tier_outage.py": (f"{_CONNECTOR}/blocks/", *_LMCACHE),
    "tests/e2e/test_vllm_options.py": (
        f"{_CONNECTOR}/vllm_options.py",
        f"{_CONNECTOR}/plugin.py",
        f"{_CONNECTOR}/engine/",
    ),
}
#: What a branch is compared with; the first that there is.
_TRUNKS = ("origin/main", "main")


def changed_files() -> frozenset[str]:
    """Paths below the root: of the branch's commits and of the work tree.

    On the trunk itself those of its last commit. Empty where git cannot say, as in an
    unpacked archive or a shallow clone.
    """
    base = _base()
    if base is None:
        return frozenset()
    changed = _git("diff", "--name-only", base) or ""
    untracked = _git("ls-files", "--others", "--exclude-standard") or ""
    return frozenset([*changed.splitlines(), *untracked.splitlines()])


def touched(changed: Collection[str]) -> list[str]:
    """Keys of `NIGHTLY` of which a source, or the test itself, is in `changed`."""
    return [
        test
        for test, sources in NIGHTLY.items()
        if any(path.startswith((test, *sources)) for path in changed)
    ]


def _base() -> str | None:
    """The commit from which everything since then is the work under test."""
    head = _git("rev-parse", "HEAD")
    for trunk in _TRUNKS:
        base = _git("merge-base", "HEAD", trunk)
        if base is not None:
            return _git("rev-parse", "--verify", "HEAD^") if base == head else base
    return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    print(*touched(changed_files()), sep="\n")
