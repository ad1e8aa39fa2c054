"""`bench gpu` without its servers, which `make gpu-rehearsal` starts; the bundle."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.gpu import bundle, fatbin, run, serve, stage
from bench.gpu.sizes import DEVICE
from bench.gpu.stage import Stage, Verdict
from bench.tables import Check
from tests.bench.samples import served
from ttlcache_sim.steps.profile import Profile

ROOT = Path(__file__).parents[2]


def gpu(*words: str, out: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["gpu", "--out", str(out), *words])
    return done.exit_code, done.output


@pytest.fixture
def stages(monkeypatch):
    """Stages of this test's own, in this process; a name -> what it does."""
    own = {}
    monkeypatch.setattr(run, "_REHEARSED_AT_ONCE", 1)  # they share this process

    def in_process(name, options, limit_s):
        (options.out / f"{name}.log").touch()
        alone = replace(options, stage=[name], alone=True)
        try:
            return "" if run.gpu(alone, None) == 0 else "failed"
        except RuntimeError as error:
            return str(error)

    monkeypatch.setattr(run, "STAGES", own)
    monkeypatch.setattr(run, "_in_process", in_process)
    return own


def test_without_a_device_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "device_name", lambda: None)
    status, output = gpu(out=tmp_path)
    assert status == run.NO_DEVICE == 3
    assert "no CUDA device" in output
    assert list(tmp_path.iterdir()) == []


def test_a_failure_does_not_stop_the_next_and_is_resumed(tmp_path, stages):
    measured = []

    def broken(stage: Stage) -> Verdict:
        stage.cell("a", lambda: measured.append("a"))
        if len(measured) == 1:
            raise RuntimeError("half way")
        stage.cell("b", lambda: measured.append("b"))
        return Verdict([Check("fine", True, "1")])

    def slow(stage: Stage) -> Verdict:
        measured.append("next")
        return Verdict(bars=[Check("speed", False, "1", ">= 2")])

    stages.update(broken=broken, slow=slow)
    status, output = gpu("--rehearse", out=tmp_path)
    assert (status, measured) == (1, ["a", "next"])
    assert "half way" in output
    assert json.loads((tmp_path / "broken.json").read_text())["status"] == "half way"
    measured.append("again")
    status, output = gpu("--rehearse", out=tmp_path)
    assert status == 0  # without a GPU no bar is judged
    assert measured == ["a", "next", "again", "b"]
    assert "slow: done before" in output
    gpu("--rehearse", "--again", "--stage", "slow", out=tmp_path)
    gpu("--rehearse", "--server-args=--enforce-eager", "--stage", "slow", out=tmp_path)
    assert measured[4:] == ["next", "next"]


def test_on_a_device_a_missed_bar_is_status_1(tmp_path, stages, monkeypatch):
    monkeypatch.setattr(run, "device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(stage, "device_name", lambda: "NVIDIA Test")
    bars = [Check("speed", False, "1", ">= 2")]
    stages.update(slow=lambda _: Verdict(bars=bars))
    status, output = gpu(out=tmp_path)
    assert (status, "NVIDIA Test" in output) == (1, True)
    found = json.loads((tmp_path / "slow.json").read_text())
    assert found["machine"]["gpu"] == "NVIDIA Test"
    assert found["bars"][0]["ok"] is False
    bars[0] = Check("speed", True, "3", ">= 2")
    assert gpu("--again", out=tmp_path)[0] == 0


def test_a_stage_ends_at_its_limit_and_none_begins_behind_that_of_all(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "_MIN_STAGE_S", 0.3)
    words = ("--rehearse", "--stage", "preflight", "--stage", "pictures")
    status, output = gpu(
        *words, "--stage-limit-s", "0.5", "--limit-s", "0.7", out=tmp_path
    )
    assert status == 1
    assert "preflight: stopped after 0 s" in output
    assert "pictures: not run: no time is left" in output


@pytest.mark.parametrize(
    ("name", "file", "written", "planted"),
    [
        ("preflight", "device.py", "runtime.alloc_host(", "runtime.allocate_host("),
        ("transfer", "stages.py", "transfer, out=folder)", "transfer, into=folder)"),
        ("contract", "stages.py", '"tests/gpu"', '"tests/gpus"'),
    ],
    ids=["name", "argument", "path"],
)
def test_the_rehearsal_finds_what_is_wrong(tmp_path, name, file, written, planted):
    """Without a fault: `make gpu-rehearsal`, and the bundle below."""
    for each in ("ttlcache", "connector", "csrc", "pyproject.toml"):
        (tmp_path / each).symlink_to(ROOT / each)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    for path in (ROOT / "bench").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        if path == ROOT / "bench" / "gpu" / file:
            assert written in text
            text = text.replace(written, planted)
        copy.write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench", "gpu", "--rehearse"),
            *("--stage", name, "--out", tmp_path / "out"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'connector'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "failed" in done.stdout.lower()


def test_decodes_count_between_the_first_turns_and_the_last():
    def turn(name, number, first_token_s, departure_s):
        return served(
            program_id=name,
            turn=number,
            first_token_s=first_token_s,
            departure_s=departure_s,
            output_token_ids=(1, 2, 3),
        )

    records = [
        turn("context-0", 0, 1.0, 2.0),
        turn("context-0", 1, 8.0, 9.0),
        turn("stream-0", 0, 1.0, 4.0),  # began before
        turn("stream-0", 1, 4.0, 5.0),
        turn("stream-0", 2, 8.0, 9.5),  # ended after
    ]
    assert serve._decodes(records) == {"tpot_p99_s": 0.5, "stream_turns": 1}


def test_a_library_is_cut_to_one_architecture():
    lmcache = pytest.importorskip("lmcache")
    (path,) = Path(lmcache.__file__).parent.glob("cuda_ops*.so")
    library = path.read_bytes()
    whole, cut = (list(entries(each)) for each in (library, fatbin.cut(library, 90)))
    assert {arch for _, arch, _ in whole} > {90}
    assert {arch for _, arch, _ in cut} == {90}
    assert [e for e in whole if e[1] == 90] == cut
    start, size = fatbin._section(library, ".nv_fatbin")
    result = fatbin.cut(library, 90)
    assert (result[:start], len(result)) == (library[:start], len(library))
    assert result[start + size :] == library[start + size :]
    for broken in (
        b"not an ELF file",
        library[: start + 16] + b"\xff" * 16 + library[start + 32 :],
    ):
        with pytest.raises(ValueError):
            fatbin.cut(broken, 90)


def entries(library):
    start, size = fatbin._section(library, ".nv_fatbin")
    for at, found in fatbin._containers(library, start, start + size):
        for entry in found:
            yield at, entry.arch, entry.code


@pytest.mark.nightly
def test_a_bundle_boots(tmp_path, monkeypatch):
    wheel = tmp_path / "needed-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("needed/__init__.py", "")
        archive.writestr("needed-1.0.data/purelib/also.py", "")
        archive.writestr("needed-1.0.data/scripts/tool", "")
        archive.writestr("needed/tests/test_it.py", "")
    monkeypatch.setattr(bundle, "_download", lambda *_: [wheel])
    folder = tmp_path / "bundle"
    done = CliRunner().invoke(app, ["gpu-bundle", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    with tarfile.open(folder / "bundle.tar.xz") as packed:
        names = set(packed.getnames())
    assert {"site/needed/__init__.py", "site/also.py", "lmcache_shim.so"} <= names
    assert not any("scripts" in name or "test_it" in name for name in names)
    assert any(re.match(r"site/ttlcache-.*/entry_points.txt", name) for name in names)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "TTLCACHE_GPU_ROOT": str(tmp_path / "root"),
        "OUT": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p),
    }
    boot = ["bash", str(folder / "boot.sh"), "--rehearse", "--stage", "preflight"]
    done = subprocess.run(boot, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "gpu-results.tar.gz") as results:
        assert "./preflight.json" in results.getnames()


def test_a_server_that_fails_leaves_the_others_cells_whole(tmp_path, monkeypatch):
    """Two of three arms fit at a time; one does not start, one dies in a load."""
    together, running = [], set()

    @contextmanager
    def serving(arm, model, log_path):
        if arm.name == "pins":
            raise RuntimeError("no start")
        running.add(arm.name)
        yield arm.name
        running.remove(arm.name)

    def played(server, agents, workload):
        together.append(frozenset(running))
        if (server, workload) == ("lmcache", "2/s"):
            raise RuntimeError("died")
        return {"jct": 1.0}

    monkeypatch.setattr(serve, "serving", serving)
    monkeypatch.setattr(serve, "_played", played)
    monkeypatch.setattr(serve, "free_gpu_bytes", lambda: 50)
    monkeypatch.setattr(serve.tiny_model, "build", lambda path, shape: path)
    arms = ("vanilla", "pins", "lmcache")
    agents = replace(DEVICE.serve, arms=arms, server_bytes=20)
    stage = Stage("serve", DEVICE, tmp_path, {"machine": {}})
    workloads = {load: dict.fromkeys(arms, load) for load in ("1/s", "2/s")}
    with pytest.raises(RuntimeError, match="no start"):
        serve.play_arms(stage, agents, workloads)
    assert list(stage.cells) == ["vanilla, 1/s", "vanilla, 2/s", "lmcache, 1/s"]
    assert together == [{"vanilla"}] * 2 + [{"lmcache"}] * 2
    assert not running


@pytest.mark.parametrize(("saved_s", "ok"), [(0.2, True), (0.02, False), (0.4, False)])
def test_the_learnt_price_is_near_the_profile_s(tmp_path, saved_s, ok):
    stage = Stage("serve", DEVICE, tmp_path, {"machine": {}})
    cell = {"prefill_tokens_saved": 8192, "prefill_seconds_saved": saved_s}
    assert serve._price(stage, [cell]).ok is None  # nothing to compare it with
    steps = Stage("steps", DEVICE, tmp_path, {"machine": {}})
    steps.cell("profile", lambda: asdict(Profile(0.006, 2.5e-5, 0.0, 0.0)))
    assert serve._price(stage, [cell]).ok is ok
