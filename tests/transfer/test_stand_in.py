"""tests/gpu and the CUDA runtime on a stand-in for CuPy, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.csrc import ptx
from tests.faults import faults_of

ROOT = Path(__file__).parents[2]
PATH = (ROOT / "tests/stand_in", ROOT, ROOT / "connector")
GPU = ROOT / "tests/gpu"
RUNTIME = ROOT / "ttlcache/transfer/cupy_runtime.py"
#: What only a device that fails or lacks something reaches.
FAILURES = ("except", "raise", "return None", "pytest.skip")

pytest.importorskip("cupy", minversion="14")
pytestmark = pytest.mark.skipif(bool(ptx.missing()), reason=ptx.missing())


def python(*args, path=PATH):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )


def test_the_engines_gpu_tests_pass_and_miss_no_line(tmp_path):
    suite, data = GPU / "test_cupy_engine.py", f"--data-file={tmp_path / 'coverage'}"
    plain = ("--rcfile=/dev/null", data, f"--include={RUNTIME},{suite}")
    report = tmp_path / "report.xml"
    run = ("-m", "pytest", "-q", f"--junitxml={report}", suite)
    done = python("-m", "coverage", "run", *plain, *run)
    assert done.returncode == 0, done.stdout[-5000:]
    cases = ElementTree.parse(report).findall(".//testcase")
    assert not any(len(case) for case in cases), done.stdout[-5000:]  # none is skipped
    assert len(cases) >= 45
    python("-m", "coverage", "json", *plain, "-o", tmp_path / "coverage.json")
    files = json.loads((tmp_path / "coverage.json").read_text())["files"]
    assert len(files) == 2
    for name, file in files.items():
        lines = (ROOT / name).read_text().splitlines()
        missed = [lines[number - 1].strip() for number in file["missing_lines"]]
        assert [line for line in missed if not line.startswith(FAILURES)] == []


def test_without_a_device_the_gpu_tests_end_with_a_status_of_their_own():
    done = python("-m", "pytest", "-q", "tests/gpu", path=PATH[1:])
    assert done.returncode == 3
    assert "tests/gpu did not run: no CUDA device" in done.stdout + done.stderr


#: Planted in the runtime's source.
FAULTS = faults_of("""
a wrong name: "eventRecord" -> "recordEvent"
an argument too few: "streamWaitEvent", stream, event -> "streamWaitEvent", stream
arguments swapped: "eventRecord", event, stream -> "eventRecord", stream, event
no wait for the event: "streamWaitEvent", stream, event -> "streamQuery", stream
done before it is: "eventSynchronize" -> "eventQuery"
times swapped: "eventElapsedTime", first, last -> "eventElapsedTime", last, first
sides swapped: "memcpyAsync", dst, src -> "memcpyAsync", src, dst
pitches swapped: (dst, dst_pitch, src, src_pitch, -> (dst, src_pitch, src, dst_pitch,
no such kind of copy: MEMCPY_DEFAULT = 4 -> MEMCPY_DEFAULT = 5
no such order of sources: ORDER_ANY = 1, 3 -> ORDER_ANY = 0, 0
the driver's later interface: BATCH_SINCE = 12080 -> BATCH_SINCE = 13000
deprecated: Stream.from_external(_RawStream(stream)) -> ExternalStream(stream)
a kernel on the null stream: _RawStream(stream)) -> _RawStream(0))
grid and block swapped: (ctas,), (THREADS_PER_CTA,) -> (THREADS_PER_CTA,), (ctas,)
arguments of 32 bits: np.uint64(arg) -> np.uint32(arg)
options in a list: options=NVRTC_OPTIONS -> options=list(NVRTC_OPTIONS)
memory not registered: "hostRegister" -> "hostUnregister"
""")
FAULTS["a batch's attributes and firsts swapped"] = (
    "ctypes.addressof(attributes),\n            ctypes.addressof(first),",
    "ctypes.addressof(first),\n            ctypes.addressof(attributes),",
)
FAULTS["sides of a batch swapped"] = (
    "dst.ctypes.data,\n            src.ctypes.data,",
    "src.ctypes.data,\n            dst.ctypes.data,",
)
#: A process a fault: some end the device. Every method, order by events, both ways.
TRY_FAULTS = """
import importlib.util, os, pathlib, sys, types
from tests.gpu import test_cupy_engine as gpu
from ttlcache.transfer.cupy_engine import Method
source = pathlib.Path({runtime!r}).read_text()
def smoke(text):
    module = types.ModuleType("planted")
    sys.modules["planted"] = module
    exec(compile(text, "planted", "exec"), vars(module))
    runtime = module.CupyRuntime(0)
    for method in (Method.BATCH, Method.COPY_2D, Method.KERNEL):
        gpu.test_a_store_waits_for_the_work_before_its_event(runtime, method)
        gpu.test_a_load_is_reported_when_its_bytes_are_there(runtime, method)
def survives(text):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        smoke(text)
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr)
        os._exit(1)
    os._exit(0)
gpu.WAIT_S = 5
print([True, "none"] if survives(source) else [])
for name, (right, wrong) in {faults!r}.items():
    assert source.count(right) == 1, name
    print([survives(source.replace(right, wrong)), name])
"""


def test_a_fault_planted_in_the_runtime_is_found():
    text = TRY_FAULTS.format(runtime=str(RUNTIME), faults=FAULTS)
    done = python("-c", "import cupy\n" + text)
    assert done.returncode == 0, done.stderr
    survivors = [line for line in done.stdout.splitlines() if "True" in line]
    assert survivors == [str([True, "none"])], done.stderr
    assert done.stdout.count("False") == len(FAULTS)
