"""Starting, watching and stopping a server process; reading its metrics."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serve.ports import free_ports
from bench.serve.process import ServerError
from bench.serve.server import ServerOptions, VLLMServer, by_label, parse_metrics, total
from tests.waiting import becomes

HANG_S = 300.0
METRICS = """\
# HELP ttlcache_pins_total Pins by how they ended.
# TYPE ttlcache_pins_total counter
ttlcache_pins_total{engine="0",outcome="claimed"} 7.0
ttlcache_pins_total{engine="1",outcome="claimed"} 2.0
ttlcache_pins_total{engine="0",outcome="expired"} 1.0
ttlcache_pins_started{engine="0",outcome="claimed"} 1.7e9
# HELP vllm:request_queue_time_seconds Waiting.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="+Inf"} 4.0
vllm:request_queue_time_seconds_count 4.0
vllm:request_queue_time_seconds_sum 2.5
"""

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


class ScriptServer(VLLMServer):
    """Runs a Python script where vLLM would run."""

    def __init__(self, script: str, log_path: Path, timeout_s: float = HANG_S) -> None:
        options = ServerOptions(num_blocks=16)
        super().__init__(Path("model"), options, log_path, timeout_s)
        self.command = (sys.executable, "-c", script.replace("PORT", str(self.port)))


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def child_of(log: Path) -> int:
    """What `HEALTHY` started."""
    return int(log.read_text().split()[1])


def test_two_processes_are_never_told_the_same_port():
    ours = free_ports(200)
    tell = "from bench.serve.ports import free_ports; print(*free_ports(200))"
    done = subprocess.run(
        [sys.executable, "-c", tell], capture_output=True, text=True, check=True
    )
    theirs = {int(port) for port in done.stdout.split()}
    assert len(theirs) == len(set(ours)) == 200
    assert not theirs & set(ours)
    for _ in range(2):  # a server may have it, and have it again
        with socket.create_server(("127.0.0.1", ours[0])):
            socket.create_connection(("127.0.0.1", ours[0]), timeout=10.0).close()


def test_metrics_are_summed_over_labels():
    samples = parse_metrics(METRICS)
    assert total(samples, "ttlcache_pins_total") == 10.0
    assert total(samples, "absent") == 0.0
    outcomes = by_label(samples, "ttlcache_pins_total", "outcome")
    assert outcomes == {"claimed": 9.0, "expired": 1.0}
    assert total(samples, "vllm:request_queue_time_seconds_sum") == 2.5
    assert not any(name.endswith("_created") for name, _ in samples)


def test_a_server_that_dies_at_start_is_reported_with_its_log(tmp_path):
    script = "print('loading'); raise ValueError('the pool is too small')"
    server = ScriptServer(script, tmp_path / "logs" / "server.log")
    with pytest.raises(ServerError) as caught, server:
        pass
    message = str(caught.value)
    assert "exit status 1" in message
    assert "ValueError: the pool is too small" in message
    assert str(tmp_path) in message


def test_the_cause_is_shown_when_the_logs_tail_has_lost_it(tmp_path):
    script = (
        "print('(EngineCore pid=1) ERROR 11-21 [c.py:1] ValueError: bad key polcy')\n"
        "for n in range(100): print('frame', n)\n"
        "raise SystemExit(3)"
    )
    with pytest.raises(ServerError, match="bad key polcy") as caught:
        ScriptServer(script, tmp_path / "server.log").__enter__()
    assert "frame 3\n" not in str(caught.value)


def test_a_server_that_never_answers_is_stopped(tmp_path):
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(900)"
    server = ScriptServer(script, tmp_path / "log", 0.6)
    with pytest.raises(ServerError, match=r"not ready after 0\.6 s"), server:
        pass
    # Killed perhaps before Python itself had started.
    for pid in server.log_path.read_text().split():
        assert not is_running(int(pid))


BENCH = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # what started the tests may ignore some
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from bench.serve.process import ServerProcess, stop_servers_on_signals

stop_servers_on_signals()
command = (sys.executable, "-c", sys.argv[1])
server = ServerProcess(command, sys.argv[2], Path(sys.argv[3]), 900.0)
if server.health_url.endswith(":0"):  # never: in a thread, as the fleet starts its own
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.start).result()
else:
    with server:
        print("healthy", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (signal.SIGINT, "starting"),
        (signal.SIGTERM, "serving"),
        (signal.SIGHUP, "serving"),
    ],
)
def test_a_signal_to_the_bench_ends_its_servers(tmp_path, number, where):
    (port,), log = free_ports(1), tmp_path / "log"
    url = f"http://127.0.0.1:{port if where == 'serving' else 0}"
    script = HEALTHY.replace("PORT", str(port))
    with subprocess.Popen(
        [sys.executable, "-c", BENCH, script, url, log],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as bench:
        has_begun = becomes(
            lambda: log.exists() and log.read_text().endswith("\n"), HANG_S
        )
        assert has_begun, bench.poll()
        if where == "serving":
            assert bench.stdout is not None
            assert bench.stdout.readline() == b"healthy\n"
        bench.send_signal(number)
        bench.send_signal(number)  # an impatient user
        try:
            assert bench.wait(60.0) == 128 + number
        finally:
            bench.kill()  # or leaving would wait for it
    assert becomes(lambda: not is_running(child_of(log)), HANG_S)


def test_error_lines_of_the_log_are_found(tmp_path):
    errors = [
        "ERROR 11-21 05:39:43 [core.py:1] engine died",
        "(EngineCore pid=4465) ERROR 11-21 05:39:43 [__init__.py:72] no plugin",
        "\x1b[31mERROR\x1b[0m 11-21 05:39:43 [core.py:1] coloured",
        "Traceback (most recent call last):",
    ]
    harmless = [
        "(APIServer pid=1) WARNING 11-21 05:39:25 [a.py:1] OSError: [Errno 24]",
        "INFO 11-21 05:39:25 [a.py:1] errors are logged at level=ERROR",
        "(APIServer pid=1) INFO 11-21 05:39:25 [a.py:1] ERROR rate is 0",
    ]
    server = ScriptServer("", tmp_path / "log")
    server.log_path.write_text("\n".join([*harmless, *errors]))
    assert server.errors_in_log() == errors


def test_only_the_engines_leaving_is_let_pass_and_only_at_shutdown(tmp_path):
    left = "(APIServer pid=1) ERROR 11-21 [async_llm.py:906] EngineDeadError"
    script = (
        "import signal, time\n"
        "def stop(*_):\n"
        f"    print({left!r}); print('ERROR 11-21 [x.py:1] pins left', flush=True)\n"
        "    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"print({left!r}, flush=True)\n"
    ) + HEALTHY
    server = ScriptServer(script, tmp_path / "log")
    with server:
        assert server.errors_in_log() == [left]
    assert server.errors_in_log() == [left, "ERROR 11-21 [x.py:1] pins left"]
