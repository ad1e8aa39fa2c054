"""Where names of vLLM are looked for."""

from __future__ import annotations

import json

import pytest

from bench.surface import vllm_moved


def places(monkeypatch, *modules):
    monkeypatch.setattr(vllm_moved, "_MODULES", {"dumps": modules})


@pytest.mark.parametrize("gone", ["no_such_package.deep.inside", "json.no_such_part"])
def test_a_module_or_a_whole_package_may_be_gone(monkeypatch, gone):
    places(monkeypatch, gone, "math", "json")
    assert vllm_moved.find("dumps") is json.dumps


def test_a_module_that_lacks_what_it_imports_is_no_older_version(monkeypatch, tmp_path):
    (tmp_path / "broken_here.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    places(monkeypatch, "broken_here", "json")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        vllm_moved.find("dumps")


def test_a_name_that_is_nowhere_is_an_error(monkeypatch):
    places(monkeypatch, "math")
    with pytest.raises(AttributeError, match="dumps is in none"):
        vllm_moved.find("dumps")
