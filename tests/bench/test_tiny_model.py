"""The tiny model folder: deterministic, reused, and never somebody else's."""

import pytest

from bench.serve import tiny_model
from bench.serve.tiny_model import ModelShape

SMALL = ModelShape(layers=1, hidden=64, heads=2, kv_heads=1, intermediate=64)

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_same_seed_same_files_and_an_intact_folder_is_reused(tmp_path):
    first = tiny_model.build(tmp_path / "a", seed=1, shape=SMALL)
    second = tiny_model.build(tmp_path / "b", seed=1, shape=SMALL)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_model.build(tmp_path / "a", seed=1, shape=SMALL) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written


def test_another_seed_or_a_damaged_file_rebuilds(tmp_path):
    path = tiny_model.build(tmp_path / "m", seed=1, shape=SMALL)
    weights = (path / "model.safetensors").read_bytes()
    tiny_model.build(path, seed=2, shape=SMALL)
    assert (path / "model.safetensors").read_bytes() != weights
    (path / "model.safetensors").write_bytes(b"")
    tiny_model.build(path, seed=1, shape=SMALL)
    assert (path / "model.safetensors").read_bytes() == weights


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not made by"):
        tiny_model.build(tmp_path, shape=SMALL)
    assert (tmp_path / "notes.txt").read_text() == "keep me"
