"""The recorder: nothing waits for it, nothing is lost but what it says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttlcache.recorder import Recorder

FIELDS = {"end": ("program", "how", "turns")}


def make(folder: Path, **settings: object) -> Recorder:
    settings = {"flush_s": 60.0, **settings}  # tests flush by hand
    return Recorder(folder, FIELDS, {"policy": "fixed"}, run="r", **settings)


def lines(folder: Path) -> list[dict]:
    files = sorted(folder.glob("events-*.jsonl"))
    return [json.loads(text) for file in files for text in file.open()]


def test_events_become_lines_behind_a_head(tmp_path):
    recorder = make(tmp_path)
    recorder.put(1.5, "end", ("a", "idle", 3))
    recorder.close()
    head, event = lines(tmp_path)
    assert (head["ev"], head["policy"]) == ("start", "fixed")
    assert event == {"t": 1.5, "ev": "end", "program": "a", "how": "idle", "turns": 3}


def test_the_queue_is_bounded_and_drops_are_counted(tmp_path):
    recorder = make(tmp_path, max_pending=10)
    for number in range(25):
        recorder.put(0.0, "end", ("a", "idle", number))
    assert (recorder.pending, recorder.dropped) == (10, 15)
    recorder.flush()
    assert recorder.pending == 0
    recorder.put(0.0, "end", ("a", "idle", 99))
    recorder.close()
    assert [line["turns"] for line in lines(tmp_path)[1:]] == [*range(10), 99]


def test_files_rotate_and_old_ones_go(tmp_path):
    recorder = make(tmp_path, max_file_bytes=2000, max_files=3)
    for number in range(500):
        recorder.put(0.0, "end", ("a", "idle", number))
    recorder.close()
    files = sorted(tmp_path.glob("events-*.jsonl"))
    assert len(files) == 3
    assert all(file.stat().st_size < 2000 + 64 * 80 for file in files)
    heads = [json.loads(file.open().readline()) for file in files]
    assert all(head["ev"] == "start" for head in heads)
    assert lines(tmp_path)[-1]["turns"] == 499


def test_a_disk_that_fails_ends_the_recording_only(tmp_path, caplog):
    recorder = make(tmp_path)

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            return

    recorder._file.close()
    recorder._file = Full()
    for number in range(100):
        recorder.put(0.0, "end", ("a", "idle", number))
    recorder.flush()
    recorder.put(0.0, "end", ("a", "idle", 100))
    recorder.flush()
    assert recorder.pending == 0
    assert recorder.dropped > 0
    assert caplog.text.count("No space left") == 1
    recorder.close()


def test_what_is_no_json_is_dropped_alone(tmp_path):
    recorder = make(tmp_path)
    recorder.put(0.0, "end", ("a", {("no", "key"): 1}, 1))
    recorder.put(0.0, "no such kind", ("a",))
    recorder.put(0.0, "end", ("too", "few"))
    recorder.put(0.0, "end", ("\ud800", object(), 2))
    recorder.close()
    assert [line["turns"] for line in lines(tmp_path)[1:]] == [2]
    assert recorder.dropped == 3


def test_a_folder_that_cannot_be_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make(tmp_path / "file" / "folder")


def test_events_after_the_end_are_dropped(tmp_path):
    recorder = make(tmp_path)
    recorder.close()
    recorder.put(0.0, "end", ("a", "idle", 1))
    assert (recorder.pending, recorder.dropped) == (0, 1)


CHILD = """
import sys, threading
from pathlib import Path
from ttlcache.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), {"end": ("n",)}, {}, run="r")
for n in range(1000):
    recorder.put(0.0, "end", (n,))
threading.Event().wait()
"""


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            files = list(tmp_path.glob("events-*.jsonl"))
            if files and files[0].read_bytes().count(b"\n") == 1001:
                break
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert [line["n"] for line in lines(tmp_path)[1:]] == list(range(1000))
