"""Checkpoints: GGUF against Hugging Face folders, and what damaged files get."""

from __future__ import annotations

import json
import math
import shutil
import struct

import pytest
import torch

from onchip.engine import LLM, SamplingParams
from onchip.engine.config import base_inv_freq, from_hf, scale_rope
from onchip.engine.gguf import GGUFFile
from onchip.engine.weights import load_model, open_checkpoint
from tests.engine_models import LLAMA3_ROPE, make_model, save_folder, save_gguf

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = ["hello there", "1, 2, 3"]


@pytest.fixture(scope="module")
def llama():
    return make_model("llama", tied=False)


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    return save_folder(llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gguf_path(llama, tmp_path_factory):
    return save_gguf(llama, tmp_path_factory.mktemp("gguf") / "llama.gguf")


@pytest.fixture
def copy(folder, tmp_path):
    """A folder that a test may damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def state(path):
    return load_model(open_checkpoint(path), torch.float32).state_dict()


def set_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_equals_the_folder(architecture, tied, tmp_path):
    model = make_model(architecture, tied)
    folder = save_folder(model, tmp_path / "folder")
    file = save_gguf(model, tmp_path / "model.gguf")
    from_folder, from_file = state(folder), state(file)
    assert from_folder.keys() == from_file.keys()
    for name, value in from_folder.items():
        assert torch.equal(from_file[name], value), name
    a, b = (LLM(path, dtype=torch.float32) for path in (folder, file))
    assert a.generate(PROMPTS, GREEDY) == b.generate(PROMPTS, GREEDY)
    for name in ("num_kv_heads", "head_dim", "max_context", "tied", "eos_token_ids", "qk_norm"):
        assert getattr(a.config, name) == getattr(b.config, name), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "Q5_0"])
def test_quantised_gguf(llama, kind, tmp_path):
    path = save_gguf(llama, tmp_path / "model.gguf", kind)
    raw = {t.name: t for t in gguf.GGUFReader(path).tensors}
    file = GGUFFile(path)
    for name, tensor in raw.items():
        # float32: the package keeps float16 scales times integers in it as well
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        got = file.read(name).float().numpy()
        assert got.shape == want.shape and (got == want).all(), name
    exact, weights = llama.state_dict(), state(path)
    error = weights["layers.0.down.weight"] - exact["model.layers.0.mlp.down_proj.weight"]
    assert 0 < error.abs().max() < 0.1
    result = LLM(path, dtype=torch.float32).generate(PROMPTS, GREEDY)
    assert [len(r.token_ids) for r in result] == [16, 16]


def test_sharded_safetensors(llama, folder, tmp_path):
    sharded = save_folder(llama, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    want, got = state(folder), state(sharded)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"model-00002.* missing.*Download them"):
        open_checkpoint(sharded)


def test_progress_reaches_the_total(folder):
    calls = []
    model = load_model(
        open_checkpoint(folder), torch.float32, progress=lambda *done: calls.append(done)
    )
    total = sum(p.numel() for p in model.parameters())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls) and len(calls) > 10
    assert not any(p.requires_grad for p in model.parameters())


def test_tied_head_is_one_tensor(tmp_path):
    path = save_folder(make_model("llama", tied=True), tmp_path / "tied")
    model = load_model(open_checkpoint(path), torch.bfloat16)
    assert model.head.weight is model.embed.weight
    assert model.norm.weight.dtype == torch.float32  # norms stay exact
    assert model.embed.weight.dtype == torch.bfloat16


def test_rope_of_llama3_gguf(tmp_path):
    rope = {"rope_parameters": {"rope_theta": 10000.0, **LLAMA3_ROPE}}
    model = make_model("llama", False, **rope)
    want = LLM(save_folder(model, tmp_path / "folder"), dtype=torch.float32)
    plain = base_inv_freq(10000.0, 16)
    factors = torch.tensor(plain) / torch.tensor(want.config.inv_freq)
    path = save_gguf(model, tmp_path / "m.gguf", rope_freqs=factors.numpy())
    got = LLM(path, dtype=torch.float32)
    assert got.config.inv_freq == pytest.approx(want.config.inv_freq, rel=1e-6)
    assert got.config.inv_freq != tuple(plain)
    long = ["hello there " * 8]
    assert got.generate(long, GREEDY) == want.generate(long, GREEDY)


def test_llama3_rope_by_hand():
    # One wave in the middle of the blend: 64 positions hold 2.5 waves, (2.5 - 1) / (4 - 1) = 1/2.
    middle = 2.5 * 2 * math.pi / 64
    fast, slow = 2 * math.pi / 8, 2 * math.pi / 128
    got = scale_rope([fast, middle, slow], LLAMA3_ROPE, "config.json")
    assert got == pytest.approx((fast, middle * (1 / 2 + 1 / 16), slow / 8))
    assert scale_rope([1.0], {"rope_type": "linear", "factor": 4.0}, "") == (0.25,)


@pytest.mark.parametrize("old_spelling", [True, False])
def test_both_spellings_of_rope(folder, old_spelling):
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None), config.pop("rope_scaling", None)
    config.pop("rope_theta", None)
    if old_spelling:
        config |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    else:
        linear = {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
        config |= {"rope_parameters": linear}
    want = tuple(f / 2 for f in base_inv_freq(500.0, 16))
    assert from_hf(config, "config.json").inv_freq == want


def test_end_tokens_of_generation_config(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 257]}))
    assert open_checkpoint(copy).config.eos_token_ids == (257, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is 'GPT2.*allowed: LlamaForC"),
        ({"architectures": ...}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; allowed: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; allowed: default, lin"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing.*not complete"),
        ({"num_hidden_layers": 3}, r"model.layers.2.input_layernorm.weight, .*and 5 more missing"),
        ({"num_hidden_layers": 1}, r"model.layers.1.* unknown.*change the result"),
        ({"intermediate_size": 100}, r"gate_proj.weight is \(96, 64\), not \(100, 64\)"),
        ({"num_key_value_heads": 4}, r"k_proj.weight is \(32, 64\), not \(64, 64\)"),
    ],
)
def test_what_a_folder_may_not_say(copy, change, message):
    set_config(copy, **change)
    with pytest.raises(ValueError, match=message):
        LLM(copy)


@pytest.mark.parametrize("keep", [4, 100, 5000, -1])
def test_truncated_safetensors(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: truncated or damaged.*again"):
        LLM(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files(copy, name):
    (copy / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}.*missing.*Download"):
        LLM(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_broken_json(copy, name):
    path = copy / name
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=rf"{name}: not .*Download it again"):
        LLM(copy)


def test_no_such_path(tmp_path):
    with pytest.raises(ValueError, match=r"path: .*nowhere does not exist; allowed: a Hugging F"):
        LLM(tmp_path / "nowhere")


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.01, 0.05, 0.5, 0.999])
def test_truncated_gguf(gguf_path, tmp_path, fraction):
    data = gguf_path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(fraction * len(data))])
    with pytest.raises(ValueError, match=r"cut.gguf: .*(truncated: the file has \d+|empty|starts)"):
        LLM(path)


def test_gguf_cut_anywhere_in_the_header(gguf_path, tmp_path):
    data = gguf_path.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(8, 400, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="truncated"):
            GGUFFile(path)


def patched(gguf_path, tmp_path, at, value):
    data = bytearray(gguf_path.read_bytes())
    data[at : at + len(value)] = value
    path = tmp_path / "patched.gguf"
    path.write_bytes(data)
    return path


def test_not_a_gguf_file(gguf_path, tmp_path):
    with pytest.raises(ValueError, match=r"starts with b'GGML', a GGUF file starts with b'GGUF'"):
        LLM(patched(gguf_path, tmp_path, 0, b"GGML"))
    with pytest.raises(ValueError, match=r"GGUF version 9; allowed: \(2, 3\)"):
        LLM(patched(gguf_path, tmp_path, 4, struct.pack("<I", 9)))


def replace_once(gguf_path, tmp_path, old, new):
    data = gguf_path.read_bytes()
    assert len(old) == len(new) and old in data
    return patched(gguf_path, tmp_path, data.index(old), new)


def test_gguf_that_is_something_else(gguf_path, tmp_path):
    for old, new, message in [
        (
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0mamba",
            "architecture is 'mamba'; allowed",
        ),
        (b"smollm", b"tekken", "tokenizer.ggml.pre is 'tekken'; allowed: default, gpt-2"),
        (
            b"\x04\0\0\0\0\0\0\0gpt2",
            b"\x04\0\0\0\0\0\0\0bert",
            "ggml.model is 'bert'; allowed: gpt2",
        ),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "blk.1.attn_q.weight missing"),
        (b"llama.block_count", b"llama.block_coun_", "llama.block_count is missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(replace_once(gguf_path, tmp_path, old, new))


def test_unknown_storage_type(gguf_path, tmp_path):
    data = gguf_path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path = patched(gguf_path, tmp_path, at, struct.pack("<I", 99))
    with pytest.raises(ValueError, match=r"tensor output_norm.weight: storage type 99 is unknown"):
        GGUFFile(path)
