"""`onchip.compat.install`, `flash_attn.bert_padding`, and transformers running over them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

import onchip
from onchip import compat
from onchip.compat import bert_padding
from onchip.compat import flash_attn as fa2
from onchip.compat import flash_attn_3 as fa3

NAMES = ("flash_attn", "flash_attn_interface")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in NAMES), reason="a real package is installed"
)


@pytest.fixture
def installed():
    modules = compat.install()
    yield modules
    compat.uninstall()


def test_programs_find_the_functions(installed):
    import flash_attn
    import flash_attn_interface
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn_func is fa2.flash_attn_func
    assert flash_attn_varlen_func is fa2.flash_attn_varlen_func
    assert unpad_input is bert_padding.unpad_input
    assert flash_attn_interface.flash_attn_with_kvcache is fa3.flash_attn_with_kvcache
    for name in fa2.__all__:
        assert getattr(flash_attn, name) is getattr(fa2, name)
    assert flash_attn.__version__ == "2.8.4" and flash_attn_interface.__version__ == "3.0.0"
    assert compat.install() == installed  # again: nothing new


def test_programs_that_probe_get_answers(installed):
    for name in installed:
        assert importlib.util.find_spec(name).name == name
        assert importlib.import_module(name) is installed[name]
    assert importlib.util.find_spec("flash_attn.cute") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.layers.rotary")
    assert importlib.metadata.version("flash_attn") == "2.8.4"
    assert importlib.metadata.version("flash-attn") == "2.8.4"
    assert importlib.metadata.version("flash-attn-3") == "3.0.0"
    distributions = importlib.metadata.packages_distributions()
    assert distributions["flash_attn"] == ["flash-attn"]
    assert distributions["flash_attn_interface"] == ["flash-attn-3"]
    assert importlib.metadata.version("torch").startswith(torch.__version__.split("+")[0])


def test_uninstall_leaves_nothing():
    before, finders = set(sys.modules), list(sys.meta_path)
    compat.install()
    compat.uninstall()
    compat.uninstall()
    assert {name for name in set(sys.modules) - before if "flash" in name} == set()
    assert sys.meta_path == finders
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


@pytest.mark.parametrize("loaded", [True, False])
def test_a_real_package_is_not_overwritten(loaded, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    if loaded:
        real = ModuleType("flash_attn")  # as some programs make them: without a spec
        monkeypatch.setitem(sys.modules, "flash_attn", real)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    else:
        (tmp_path / "flash_attn.py").write_text("__version__ = '1'\n")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash_attn is installed.*force=True"):
        compat.install()
    assert "flash_attn_interface" not in sys.modules
    compat.install(force=True)
    try:
        assert importlib.import_module("flash_attn").__version__ == "2.8.4"
        assert "flash_attn.cute" not in sys.modules
    finally:
        compat.uninstall()
    if loaded:
        assert sys.modules["flash_attn"] is real and "flash_attn.cute" in sys.modules
    else:
        assert importlib.import_module("flash_attn").__version__ == "1"
        del sys.modules["flash_attn"]


MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])


def test_unpad_and_pad():
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK)
    assert indices.tolist() == [0, 1, 5, 6, 7] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 2, 5, 5] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and type(longest) is int
    assert used.tolist() == [2, 3, 0] and used.dtype == torch.int32
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    padded = bert_padding.pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, x * MASK[..., None, None])
    weights = torch.randn_like(x)
    (grad,) = torch.autograd.grad((padded * weights).sum(), x)
    assert torch.equal(grad, weights * MASK[..., None, None])


def test_unpad_keeps_room_that_does_not_count():
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    x = torch.randn(3, 4)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK.bool(), unused)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert cu_seqlens.tolist() == [0, 3, 6, 7] and longest == 3
    assert used.tolist() == [2, 3, 0]
    assert torch.equal(packed, x.flatten()[indices])
    with pytest.raises(ValueError, match="attention_mask"):
        bert_padding.unpad_input(x, MASK[:2])


def test_index_first_axis_gradients():
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[indices])
    assert torch.autograd.gradcheck(lambda t: bert_padding.index_first_axis(t, indices), x)
    put = torch.tensor([4, 0, 2])
    values = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: bert_padding.index_put_first_axis(t, put, 6), values)


def test_padded_batch_trains_as_the_dense_one(installed):
    """The way programs use the three together."""
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import pad_input, unpad_input

    qkv = torch.randn(2, 4, 3, 2, 8, requires_grad=True)
    packed, indices, cu_seqlens, longest, _ = unpad_input(qkv, MASK[:2])
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, causal=True)
    out = pad_input(out, indices, 2, 4)
    q, k, v = qkv.unbind(2)
    want = torch.zeros_like(out)
    for b, kept in enumerate((slice(0, 2), slice(1, 4))):
        part = (x[b : b + 1, kept] for x in (q, k, v))
        want[b, kept] = onchip.attention(*part, causal=True)[0]
    torch.testing.assert_close(out, want)
    grads = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in (out, want)]
    torch.testing.assert_close(*grads)


def test_functions_compile_in_one_graph(installed):
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 2, 5, 4, 8).unbind(0)
    compiled = torch.compile(flash_attn_func, backend="eager", fullgraph=True)
    out = compiled(q, k, v, softmax_scale=0.2, causal=True, window_size=(3, 0))
    assert torch.equal(out, onchip.attention(q, k, v, scale=0.2, causal=True, window=(3, 0)))


@pytest.fixture
def llama(installed, monkeypatch):
    """A tiny Llama; transformers believes in a GPU, which is all that its check of it asks."""
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *_, **__: True)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        spy = Mock(wraps=getattr(fa2, name), __signature__=inspect.signature(getattr(fa2, name)))
        monkeypatch.setattr(installed["flash_attn"], name, spy)
    # So that these functions are loaded now, and not used after.
    monkeypatch.setattr(utils, "_loaded_implementation", None, raising=False)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("padded", [False, True])
def test_transformers_llama_runs_on_it(llama, padded, installed):
    tokens = torch.randint(61, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    with torch.no_grad():
        want = llama(tokens, attention_mask=mask).logits
        text = llama.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        llama.config._attn_implementation = "flash_attention_2"
        out = llama(tokens, attention_mask=mask).logits
        packed = installed["flash_attn"].flash_attn_varlen_func.call_count
        assert (installed["flash_attn"].flash_attn_func.call_count, packed) == (
            (0, 2) if padded else (2, 0)
        )
        again = llama.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    torch.testing.assert_close(out[mask.bool()], want[mask.bool()], atol=2e-5, rtol=2e-5)
    assert torch.equal(again, text)


def test_transformers_finds_it_where_there_is_a_gpu(installed, monkeypatch):
    pytest.importorskip("transformers")
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    mapping = import_utils._package_distribution_mapping
    monkeypatch.setattr(import_utils, "_package_distribution_mapping", inspect.unwrap(mapping))
    assert inspect.unwrap(import_utils.is_flash_attn_2_available)()
    assert inspect.unwrap(import_utils.is_flash_attn_3_available)()
    assert not inspect.unwrap(import_utils.is_flash_attn_4_available)()


def test_transformers_llama_trains_on_it(llama):
    tokens = torch.randint(61, (2, 7))
    weight = llama.model.layers[0].self_attn.q_proj.weight
    (want,) = torch.autograd.grad(llama(tokens, labels=tokens).loss, weight)
    llama.config._attn_implementation = "flash_attention_2"
    (grad,) = torch.autograd.grad(llama(tokens, labels=tokens).loss, weight)
    torch.testing.assert_close(grad, want, atol=1e-6, rtol=1e-4)
