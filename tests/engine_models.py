"""Tiny random models on disk for the engine's tests, made with transformers and gguf.

Legend: H query heads, H_kv key and value heads, D head dimension.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 257
MERGES = ("h e", "he l")
VOCAB = 262  # 256 bytes, SPECIALS, a token a merge
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # logits far apart: greedy choices do not hang on rounding
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(architecture: str, tied: bool, **options):
    """A random transformers model in float32 with all norms random too."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    options = SIZES | {"tie_word_embeddings": tied} | options
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**options))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=24, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.float().eval()


def vocabulary() -> list[str]:
    """Tokens in order: the 256 characters by which byte-level BPE writes bytes first."""
    from tokenizers.pre_tokenizers import ByteLevel

    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*sorted(ByteLevel.alphabet()), *SPECIALS, *merged]


def save_folder(model, path: Path, **options) -> Path:
    """Writes model and tokenizer as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model.save_pretrained(path, **options)
    vocab = {token: i for i, token in enumerate(vocabulary())}
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": SPECIALS[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def save_gguf(model, path: Path, matrix_type: str = "F32", rope_freqs=None) -> Path:
    """Writes a transformers model as llama.cpp would."""
    import gguf

    config = model.config
    arch = config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([1] * 256 + [3] * len(SPECIALS) + [1] * len(MERGES))
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 2)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        leaf = name.split(".")[-2]
        if arch == "llama" and leaf in heads:
            value = value.unflatten(0, (heads[leaf], 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = gguf.GGMLQuantizationType[matrix_type if value.dim() == 2 else "F32"]
        data = value.contiguous().numpy()
        data = data if kind.name == "F32" else gguf.quantize(data, kind)
        new_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new_name, data, raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
