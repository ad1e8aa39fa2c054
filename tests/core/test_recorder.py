"""The recorder: nothing waits for it, nothing is lost but what it says."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from tests.waiting import becomes
from ttlcache.telemetry.recorder import Recorder


def make(folder, **settings):
    settings = {"flush_s": 60.0, **settings}  # tests flush by hand
    return Recorder(folder, {"policy": "fixed"}, run="r", **settings)


def put_turns(recorder, numbers):
    for number in numbers:
        recorder.put(0.0, "end", {"turns": number})


def lines(folder):
    files = sorted(folder.glob("events-*.jsonl"))
    return [json.loads(text) for file in files for text in file.open()]


def turns(folder):
    return [line["turns"] for line in lines(folder) if line["ev"] == "end"]


def test_events_become_lines_behind_a_head(tmp_path):
    recorder = make(tmp_path)
    recorder.put(1.5, "end", {"program": "a", "how": "idle", "turns": 3})
    recorder.close()
    head, event = lines(tmp_path)
    assert (head["ev"], head["policy"]) == ("start", "fixed")
    assert event == {"t": 1.5, "ev": "end", "program": "a", "how": "idle", "turns": 3}


def test_the_queue_is_bounded_and_drops_are_counted(tmp_path):
    recorder = make(tmp_path, max_pending=10)
    put_turns(recorder, range(25))
    assert (len(recorder._queue), recorder.dropped) == (10, 15)
    recorder.flush()
    assert len(recorder._queue) == 0
    put_turns(recorder, [99])
    recorder.close()
    assert turns(tmp_path) == [*range(10), 99]
    put_turns(recorder, [100])
    assert (len(recorder._queue), recorder.dropped) == (0, 16)


def test_files_rotate_and_old_ones_go(tmp_path):
    recorder = make(tmp_path, max_file_bytes=2000, max_files=3)
    put_turns(recorder, range(500))
    recorder.close()
    files = sorted(tmp_path.glob("events-*.jsonl"))
    assert len(files) == 3
    assert all(file.stat().st_size < 2000 + 64 * 80 for file in files)
    heads = [json.loads(file.open().readline()) for file in files]
    assert all(head["ev"] == "start" for head in heads)
    assert turns(tmp_path)[-1] == 499


@contextlib.contextmanager
def no_file_beyond(size):
    """What a full disk does, for this process: the kernel takes a part, then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_after_a_full_disk_the_recording_goes_on_without_loss(tmp_path, caplog):
    recorder = make(tmp_path)
    (path,) = tmp_path.iterdir()
    put_turns(recorder, range(200))
    with no_file_beyond(path.stat().st_size + 6000):
        recorder.flush()
        written = path.read_bytes()
        assert written.endswith(b"\n"), "half a line"
        assert 1 < written.count(b"\n") < 201
        put_turns(recorder, [200])
        recorder.flush()
        assert path.read_bytes() == written
    put_turns(recorder, [201])
    recorder.flush()
    assert (len(recorder._queue), recorder.dropped) == (0, 0)
    recorder.close()
    assert turns(tmp_path) == list(range(202))
    assert caplog.text.count("waits until it can be written: [Errno 27]") == 1
    assert caplog.text.count("goes on") == 1


def test_while_the_disk_is_full_events_are_bounded_and_counted(tmp_path):
    recorder = make(tmp_path, max_pending=100)
    (path,) = tmp_path.iterdir()
    with no_file_beyond(path.stat().st_size):
        for number in range(300):
            put_turns(recorder, [number])
            recorder.flush()
        assert len(recorder._queue) == 100
        recorder.close()
    assert (turns(tmp_path), recorder.dropped) == ([], 300)


def test_no_room_for_the_next_file_leaves_the_one_before_in_use(tmp_path):
    recorder = make(tmp_path, max_file_bytes=1000)
    with no_file_beyond(10):  # not even a head
        put_turns(recorder, range(50))
        recorder.flush()
        assert len(list(tmp_path.iterdir())) == 1
    recorder.close()
    assert turns(tmp_path) == list(range(50))


def test_a_deleted_folder_is_made_again_for_the_next_file(tmp_path):
    recorder = make(tmp_path / "rec", max_file_bytes=1000)
    shutil.rmtree(tmp_path / "rec")
    put_turns(recorder, range(200))
    recorder.close()
    assert turns(tmp_path / "rec")[-1] == 199


def test_a_file_that_is_truncated_meanwhile_goes_on_at_its_new_end(tmp_path):
    recorder = make(tmp_path)
    put_turns(recorder, [1])
    recorder.flush()
    (path,) = tmp_path.iterdir()
    os.truncate(path, 0)
    put_turns(recorder, [2])
    recorder.close()
    assert [line["turns"] for line in lines(tmp_path)] == [2]


def test_nobody_else_may_read_a_recording(tmp_path):
    mask = os.umask(0)
    try:
        recorder = make(tmp_path / "rec")
    finally:
        os.umask(mask)
    recorder.close()
    (path,) = (tmp_path / "rec").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_written_is_an_error_at_once(tmp_path):
    path = tmp_path / "events-r-00000.jsonl"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        make(tmp_path)
    assert path.read_text() == "somebody's"
    with pytest.raises(OSError):
        make(path / "folder")


def test_live_files_of_other_engines_are_never_pruned(tmp_path):
    """They are idle and so the oldest of the folder; a dead engine's go first."""
    others = [Recorder(tmp_path, {}, run=f"other-{n}", flush_s=60.0) for n in range(4)]
    (tmp_path / "events-dead-00000.jsonl").write_text("{}\n")
    for path in tmp_path.iterdir():
        os.utime(path, (0.0, 0.0))
    recorder = make(tmp_path, max_file_bytes=2000, max_files=3)
    put_turns(recorder, range(500))
    recorder.flush()
    left = {path.name for path in tmp_path.iterdir()}
    assert {f"events-other-{n}-00000.jsonl" for n in range(4)} < left
    assert len(left) == 7, "the four, and the newest three"
    for other in others:
        other.put(0.0, "end", {"program": "b"})
        other.close()
    recorder.close()
    assert sum(line.get("program") == "b" for line in lines(tmp_path)) == 4


def test_what_is_no_json_is_dropped_alone(tmp_path):
    recorder = make(tmp_path)
    recorder.put(0.0, "end", {"how": {("no", "key"): 1}, "turns": 1})
    recorder.put(0.0, "end", {"program": "\ud800", "how": object(), "turns": 2})
    recorder.close()
    assert turns(tmp_path) == [2]
    assert recorder.dropped == 1


CHILD = """
import sys, threading
from pathlib import Path
from ttlcache.telemetry.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), {}, run="r")
for n in range(1000):
    recorder.put(0.0, "end", {"turns": n})
threading.Event().wait()
"""


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)])
    path = tmp_path / "events-r-00000.jsonl"

    def is_written():
        return path.exists() and path.read_bytes().count(b"\n") == 1001

    try:
        assert becomes(is_written, patience_s=60.0)
    finally:
        child.kill()
        child.wait()
    assert turns(tmp_path) == list(range(1000))
