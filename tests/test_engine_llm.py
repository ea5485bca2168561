"""The engine against transformers: tokens, logits, batching, preemption, sampling, streaming."""

from __future__ import annotations

import pytest
import torch

from onchip.engine import LLM, SamplingParams
from onchip.engine.sampling import nucleus, sample
from tests.engine_models import EOS_ID, LLAMA3_ROPE, VOCAB, make_model, save_folder

pytest.importorskip("transformers")
NUM_TOKENS = 32
KINDS = {
    "llama": ("llama", False, {}),
    "llama-tied": ("llama", True, {}),
    "llama3-rope": ("llama", False, {"rope_parameters": {"rope_theta": 10000.0, **LLAMA3_ROPE}}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-tied": ("qwen3", True, {}),
}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def random_prompts(lengths=(1, 5, 33, 17), seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> (transformers model, folder)."""
    made = {}
    for kind, (architecture, tied, options) in KINDS.items():
        model = make_model(architecture, tied, **options)
        made[kind] = (model, save_folder(model, tmp_path_factory.mktemp(kind)))
    return made


@pytest.fixture(scope="module")
def folder(models):
    return models["llama"][1]


def load(folder, **sizes):
    return LLM(folder, dtype=torch.float32, **sizes)


def expected_tokens(model, prompt):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def record_logits(llm):
    """Collects the logits of every step, by sequence."""
    seen = {}
    inner = llm.runner.logits

    def logits(batch):
        rows = inner(batch)
        for seq, row in zip(batch.sequences, rows, strict=True):
            seen.setdefault(tuple(seq.prompt_ids), []).append(row.clone())
        return rows

    llm.runner.logits = logits
    return seen


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_equal_transformers(models, kind, page_size):
    model, folder = models[kind]
    prompts = random_prompts()
    llm = load(folder, page_size=page_size, cache_tokens=1024)
    seen = record_logits(llm)
    results = llm.generate(prompts, GREEDY)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == expected_tokens(model, prompt)
        assert result.finish_reason == "length"
        with torch.inference_mode():
            whole = model(torch.tensor([prompt + result.token_ids])).logits[0]
        want = whole[len(prompt) - 1 : -1]  # (NUM_TOKENS, V)
        got = torch.stack(seen[tuple(prompt)])
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()
    assert llm.stats.prefill_tokens == sum(map(len, prompts))
    assert llm.stats.decode_tokens == len(prompts) * (NUM_TOKENS - 1)
    llm.cache.check_integrity()
    assert llm.cache.pool.num_used == 0


def test_prompts_run_packed_then_together(folder):
    llm = load(folder)
    sizes = []
    inner = llm.runner.model.forward

    def forward(token_ids, positions, ctx):
        sizes.append((ctx.is_prefill, len(token_ids)))
        return inner(token_ids, positions, ctx)

    llm.runner.model.forward = forward
    llm.generate(random_prompts((3, 9, 4)), SamplingParams(max_tokens=4, ignore_eos=True))
    assert sizes == [(True, 16), (False, 3), (False, 3), (False, 3)]


def test_max_batch_tokens_splits_the_prefill(folder):
    prompts = random_prompts((6, 6, 6, 40))
    whole, split = load(folder), load(folder, max_batch_tokens=12)
    assert split.generate(prompts, GREEDY) == whole.generate(prompts, GREEDY)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_no_token(folder, page_size, temperature):
    prompts = random_prompts((20, 7, 12, 3))
    wishes = [
        SamplingParams(NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    roomy, tight = load(folder), load(folder, page_size=page_size, cache_tokens=60)
    got = tight.generate(prompts, wishes)
    assert tight.scheduler.num_preempted > 0
    assert roomy.scheduler.num_preempted == 0
    assert got == roomy.generate(prompts, wishes)
    tight.cache.check_integrity()
    assert tight.cache.pool.num_used == 0


def test_waiting_for_room_changes_no_token(folder):
    prompts = random_prompts((20, 7, 12, 3))
    one_by_one = load(folder, max_num_seqs=1)
    assert one_by_one.generate(prompts, GREEDY) == load(folder).generate(prompts, GREEDY)


def test_generation_ends_where_the_cache_does(folder):
    llm = load(folder, page_size=4, cache_tokens=16)
    full, nearly = random_prompts((16, 14))
    results = llm.generate([full, nearly], GREEDY)
    # The last token needs no slot: nothing comes after it.
    assert [len(r.token_ids) for r in results] == [1, 3]
    assert [r.finish_reason for r in results] == ["length", "length"]


def test_too_long_a_prompt_is_refused_before_anything_runs(folder):
    llm = load(folder, page_size=4, cache_tokens=16)
    with pytest.raises(ValueError, match=r"prompts\[1\]: has 17 tokens; allowed: 16.*cache_tokens"):
        llm.generate(random_prompts((3, 17)), GREEDY)
    assert not llm.scheduler.waiting and not llm.stats.prefill_tokens
    with pytest.raises(ValueError, match=r"prompts\[0\]: has 513 tokens; allowed: 512"):
        load(folder).generate(random_prompts((513,)), GREEDY)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([""], r"prompts\[0\]: is empty"),
        ([[1], []], r"prompts\[1\]: is empty"),
        ([[1, VOCAB]], rf"other token ids; allowed: ids from 0 to {VOCAB - 1}"),
        ([[-1]], "other token ids"),
    ],
)
def test_bad_prompts(folder, prompts, message):
    with pytest.raises(ValueError, match=message):
        load(folder).generate(prompts, GREEDY)


def test_params_one_a_prompt(folder):
    llm, prompts = load(folder), random_prompts((4, 4))
    wishes = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(r.token_ids) for r in llm.generate(prompts, wishes)] == [2, 5]
    with pytest.raises(ValueError, match="params: got 1 for 2 prompts"):
        llm.generate(prompts, wishes[:1])


def test_a_seed_repeats_and_neighbours_do_not_matter(folder):
    llm, prompts = load(folder), random_prompts((5, 8, 3))
    drawn = SamplingParams(24, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    alone = llm.generate([prompts[0]], drawn)[0]
    assert llm.generate([prompts[0]], drawn)[0] == alone
    others = SamplingParams(16, temperature=0.7, seed=5, ignore_eos=True)
    together = llm.generate(prompts, [drawn, others, GREEDY])
    assert together[0] == alone
    assert together[2] == llm.generate([prompts[2]], GREEDY)[0]
    other_seed = SamplingParams(24, temperature=1.0, top_p=0.95, seed=12, ignore_eos=True)
    assert llm.generate([prompts[0]], other_seed)[0].token_ids != alone.token_ids


def test_stop_token(folder):
    llm, prompt = load(folder), random_prompts((6,))
    tokens = llm.generate(prompt, GREEDY)[0].token_ids
    stop = tokens[9]
    result = llm.generate(prompt, SamplingParams(NUM_TOKENS, stop_token_ids=[stop]))[0]
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_models_own_end_token(folder):
    llm, prompt = load(folder), random_prompts((6,))
    inner = llm.runner.model.logits
    steps = []

    def logits(hidden):
        rows = inner(hidden)
        steps.append(len(rows))
        if len(steps) == 4:
            rows[:, EOS_ID] = 1e4
        return rows

    llm.runner.model.logits = logits
    result = llm.generate(prompt, SamplingParams(NUM_TOKENS))[0]
    assert result.token_ids[-1] == EOS_ID and len(result.token_ids) == 4
    assert result.finish_reason == "stop"
    assert "<|eos|>" not in result.text


def test_stop_string_is_cut_off(folder):
    llm, prompt = load(folder), random_prompts((6,))
    text = llm.generate(prompt, GREEDY)[0].text
    stop = text[8:10]
    result = llm.generate(prompt, SamplingParams(NUM_TOKENS, stop=stop, ignore_eos=True))[0]
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"


def test_stream_gives_what_generate_gives(folder):
    llm, prompts = load(folder), random_prompts((5, 9))
    wishes = [SamplingParams(n, ignore_eos=True) for n in (12, 7)]
    results = llm.generate(prompts, wishes)
    tokens = list(llm.stream(prompts, wishes))
    for index, result in enumerate(results):
        own = [t for t in tokens if t.index == index]
        assert [t.token_id for t in own] == result.token_ids
        assert "".join(t.text for t in own) == result.text
        assert [t.finish_reason for t in own] == [None] * (len(own) - 1) + ["length"]
    assert [t.index for t in tokens[:4]] == [0, 1, 0, 1]


def test_streams_may_be_read_in_turns_and_left_early(folder):
    llm, prompts = load(folder), random_prompts((5, 9))
    want = [[t.token_id for t in llm.stream([p], GREEDY)] for p in prompts]
    first, second = (llm.stream([p], GREEDY) for p in prompts)
    got = [next(first).token_id, next(second).token_id, next(first).token_id]
    second.close()
    assert len(llm.scheduler.running) == 1
    rest = [t.token_id for t in first]
    assert [got[0], got[2], *rest] == want[0]
    assert got[1] == want[1][0]
    assert llm.cache.pool.num_used == 0


def test_a_failing_step_loses_nothing(folder):
    llm, prompts = load(folder), random_prompts((5, 9))
    want = llm.generate(prompts, GREEDY)
    stream, tokens = llm.stream(prompts, GREEDY), []
    tokens += [next(stream) for _ in range(4)]
    other, inner = llm.stream(prompts, GREEDY), llm.runner.model.forward

    def interrupt(*args):
        raise KeyboardInterrupt

    llm.runner.model.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(other)
    llm.runner.model.forward = inner
    tokens += list(stream)
    for index, result in enumerate(want):
        assert [t.token_id for t in tokens if t.index == index] == result.token_ids
    llm.cache.check_integrity()


def test_chat_uses_the_models_template(folder):
    llm = load(folder)
    messages = [{"role": "user", "content": "hello"}]
    prompt = "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n"
    result = llm.chat(messages, GREEDY)
    assert result.prompt_ids == llm.tokenizer.encode(prompt)
    assert result == llm.generate(prompt, GREEDY)[0]
    assert "".join(t.text for t in llm.stream_chat(messages, GREEDY)) == result.text


def test_bfloat16_stays_close_to_float32(folder):
    exact, half = load(folder), LLM(folder, dtype=torch.bfloat16)
    prompt = random_prompts((24,))
    logits = []
    for llm in (exact, half):
        seen = record_logits(llm)
        llm.generate(prompt, SamplingParams(1, ignore_eos=True))
        logits.append(seen[tuple(prompt[0])][0])
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.02
    assert logits[1].dtype == torch.float32


@pytest.mark.parametrize("name", ["page_size", "cache_tokens", "max_num_seqs", "max_batch_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_sizes_are_checked(folder, name, value):
    with pytest.raises((ValueError, TypeError), match=f"{name}: got .*; allowed: "):
        load(folder, **{name: value})


def test_nothing_to_do(folder):
    llm = load(folder)
    assert llm.step() == [] and llm.generate([]) == []


def test_dtype_is_checked(folder):
    with pytest.raises(ValueError, match="dtype: got torch.int8; allowed: torch.float32"):
        LLM(folder, dtype=torch.int8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("stop", ("a", "")),
    ],
)
def test_sampling_params_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name}: got .*; allowed: "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, [0, 1, 2, 3]), (0.81, [0, 1, 2]), (0.8, [0, 1]), (0.01, [1])]
)
def test_nucleus(top_p, kept):
    probabilities = torch.tensor([0.3, 0.5, 0.15, 0.05], dtype=torch.float64)
    got = nucleus(probabilities, top_p)
    assert got.nonzero().flatten().tolist() == kept
    assert torch.equal(got[kept], probabilities[kept])


def test_sampling_frequencies():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=1)
    generator = params.generator()
    drawn = [sample(logits, [params], [generator])[0] for _ in range(2000)]
    p = (logits[0] / 0.5).softmax(0)  # 0.016, 0.117, 0.864, 0.002: the best two reach 0.9
    want = p[1] / (p[1] + p[2])
    assert set(drawn) == {1, 2}
    assert abs(drawn.count(1) / 2000 - want) < 0.03
