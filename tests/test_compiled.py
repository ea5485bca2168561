"""The key under which Triton keeps a binary holds the code of the properties that it depends on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from triton.compiler.compiler import ASTSource

from onchip.kernels import compiled
from onchip.kernels.portable.decode_config import choose_decode
from onchip.kernels.portable.decode_spec import decode_spec
from tests.portable_decode_compiles import FEATURES, pose


@pytest.fixture
def spec():
    problem, tensors = pose("sm_90", 128, **FEATURES["tall_64"])
    return decode_spec(choose_decode(problem, 132), problem, tensors)


def _file_of(constant) -> str:
    function = SimpleNamespace(cache_key="f", __name__="f", arg_names=["C"])
    return ASTSource(function, {"C": "constexpr"}, {"C": constant}).hash()


def test_other_sources_mean_another_binary(monkeypatch, spec):
    before = _file_of(spec)
    assert before == _file_of(spec)
    monkeypatch.setattr(compiled, "_digest", lambda: "of other sources")
    assert before != _file_of(spec)


def test_each_object_has_its_own(spec):
    from onchip.kernels.portable.decode_tall import Tall

    tall = [Tall(spec, whole) for whole in (False, True)]
    assert len({_file_of(each) for each in (spec, *tall)}) == 3


def test_the_digest_is_that_of_all_files(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    found = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("deeper/b.py", "1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.add(compiled._digest.__wrapped__())
    assert len(found) == 3
