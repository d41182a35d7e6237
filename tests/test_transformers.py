"""`attn_implementation="monotile"` beside Transformers' own `eager`, on tiny random models: logits, generated tokens,
gradients, and what masks become."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any

import pytest

from monotile.errors import BadOption
from usable import DEVICE, ON_GPU

torch: Any = pytest.importorskip("torch", reason="these are tests of monotile.transformers")
transformers: Any = pytest.importorskip("transformers", reason="these are tests of monotile.transformers")
import monotile.torch  # noqa: E402
import monotile.transformers  # noqa: E402
from monotile.transformers import masks, paged  # noqa: E402

monotile.transformers.register()

if ON_GPU:
    torch.set_default_device(DEVICE)
TOKENS, HIDDEN = 64, 32
SIZES = {
    "vocab_size": TOKENS, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 63, "head_dim": 8, "attention_dropout": 0.0,
}  # fmt: skip
ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
GPT2 = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
CHUNKED = {
    "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 48,
    "attn_temperature_tuning": False,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "glm4": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 8},
    "mixtral": {**EXPERTS, "sliding_window": None},
    "cohere2": ALTERNATING,
    "gemma2": {**ALTERNATING, "query_pre_attn_scalar": 8},
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 8},
    "gpt_oss": {**ALTERNATING, **EXPERTS, **ROPE},
    "deepseek_v3": LATENT,
    "llama4_text": {**CHUNKED, **EXPERTS},
    "gpt2": GPT2,
}


def pair(family: Any, name: str, **sizes: Any) -> tuple[Any, Any]:
    """A random model with eager attention, and the same with monotile's."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**{**SIZES, **sizes})
    eager = family.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in eager.parameters():  # scores that differ by more than the model's initial ones
            weight += 0.1 * torch.randn_like(weight) if weight.dim() < 2 else 3 * weight
    ours = family.from_config(copy.deepcopy(config), attn_implementation="monotile").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens(batch: int = 2, length: int = 14) -> Any:
    return torch.randint(2, TOKENS - 2, (batch, length), generator=torch.Generator(DEVICE).manual_seed(1))


def close(found: Any, wanted: Any, where: Any = ...) -> None:
    assert (found - wanted)[where].abs().max() < 2e-5 * max(1.0, float(wanted[where].abs().max()))


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder(name: str) -> None:
    """Prefill with padding on the left, then decode: the same logits and the same tokens."""
    eager, ours = pair(transformers.AutoModelForCausalLM, name, **DECODERS[name])
    x, seen = tokens(), torch.ones(2, 14, dtype=torch.int64)
    seen[1, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    wanted, found = (m.generate(x, attention_mask=seen, **options) for m in (eager, ours))
    assert (found.sequences == wanted.sequences).all()
    close(torch.stack(found.logits), torch.stack(wanted.logits))


@pytest.mark.skipif(not ON_GPU, reason="float32 says the same on a CPU, in less time")
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_in_bfloat16(name: str) -> None:
    """Prefill with padding on the left, then a token at a time: as near to float32 as eager is."""
    eager, ours = pair(transformers.AutoModelForCausalLM, name, **DECODERS[name])
    x, seen = tokens(length=20), torch.ones(2, 20, dtype=torch.int64)
    seen[1, :5] = 0
    ends = 0, *range(14, 21)
    with torch.no_grad():
        wanted = _in_chunks(eager, x, seen, ends)[seen.bool()]
        rounded, found = (_in_chunks(m.bfloat16(), x, seen, ends)[seen.bool()].float() for m in (eager, ours))
    errors = [float((logits - wanted).square().mean().sqrt()) for logits in (rounded, found)]
    print(name, errors, float(wanted.square().mean().sqrt()))
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "llama4_text"])
def test_caches_and_chunks(name: str) -> None:
    """A static cache, prefill in chunks against one that grows, and padding on the right."""
    eager, ours = pair(transformers.AutoModelForCausalLM, name, **DECODERS[name])
    x, seen = tokens(), torch.ones(2, 14, dtype=torch.int64)
    seen[1, :5] = 0
    static = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    wanted, found = (m.generate(x, attention_mask=seen, **static) for m in (eager, ours))
    assert (found == wanted).all()
    with torch.no_grad():
        wanted, found = (_in_chunks(m, x, seen, (0, 6, 13, 14)) for m in (eager, ours))
        close(found, wanted, seen.bool())
        wanted, found = (m(x, attention_mask=seen.flip(0, 1)).logits for m in (eager, ours))
        close(found, wanted, seen.flip(0, 1).bool())


def _in_chunks(model: Any, x: Any, seen: Any, ends: tuple[int, ...]) -> Any:
    cache, found = None, []
    for low, high in itertools.pairwise(ends):
        answer = model(x[:, low:high], attention_mask=seen[:, :high], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        found.append(answer.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_training(name: str) -> None:
    """The gradient of every weight, with padding on the right; sinks among them."""
    eager, ours = pair(transformers.AutoModelForCausalLM, name, **DECODERS[name])
    x, seen = tokens(), torch.ones(2, 14, dtype=torch.int64)
    seen[1, -5:] = 0
    for model in (eager, ours):
        model.train()(x, attention_mask=seen, labels=x.masked_fill(seen == 0, -100)).loss.backward()
    for (weight, wanted), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
        error = (found.grad - wanted.grad).abs().max()
        assert error < 1e-5 * max(1e-3, float(wanted.grad.abs().max())), weight


def test_packed_sequences() -> None:
    """Positions that start again are another sequence, which is seen by no mask of Nq x Nk."""
    eager, ours = pair(transformers.AutoModelForCausalLM, "llama")
    x, places = tokens(1), torch.tensor([[*range(6), *range(8)]])
    with torch.no_grad():
        wanted, found = (m(x, position_ids=places, use_cache=False).logits for m in (eager, ours))
        close(found, wanted)
        close(found[:, 6:], ours(x[:, 6:]).logits)


ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "distilbert": {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "modernbert": MODERN,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder(name: str) -> None:
    eager, ours = pair(transformers.AutoModel, name, **ENCODERS[name])
    x, seen = tokens(), torch.ones(2, 14, dtype=torch.int64)
    with torch.no_grad():
        close(ours(x).last_hidden_state, eager(x).last_hidden_state)
        seen[1, -5:] = 0
        wanted, found = (m(x, attention_mask=seen).last_hidden_state for m in (eager, ours))
        close(found, wanted, seen.bool())


SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "bart": {
        "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
    },
}  # fmt: skip


# Models that do not take `sdpa`, whose decoders' layers say that they are not causal.
SILENT_DECODERS: dict[str, dict[str, Any]] = {
    "nllb-moe": {"num_experts": 2}, "bigbird_pegasus": {}, "pegasus_x": {"block_size": 4, "num_global_tokens": 4}
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT_DECODERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_that_follow_are_not_seen(name: str, compiled: bool) -> None:
    eager, ours = pair(transformers.AutoModelForSeq2SeqLM, name, **SEQ2SEQ["bart"], **SILENT_DECODERS[name])
    run = torch.compile(ours, backend="eager") if compiled else ours
    x, y = tokens(), tokens(length=6)
    with torch.no_grad():
        close(run(x, decoder_input_ids=y).logits, eager(x, decoder_input_ids=y).logits)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_cross_attention(name: str) -> None:
    """An encoder with padding, a decoder that reads it; T5 with its learned bias for each distance."""
    eager, ours = pair(transformers.AutoModelForSeq2SeqLM, name, **SEQ2SEQ[name])
    x, seen = tokens(), torch.ones(2, 14, dtype=torch.int64)
    seen[1, -5:] = 0
    with torch.no_grad():
        y = tokens(length=6)
        wanted, found = (m(x, attention_mask=seen, decoder_input_ids=y).logits for m in (eager, ours))
        close(found, wanted)
    wanted, found = (m.generate(x, attention_mask=seen, max_new_tokens=5, do_sample=False) for m in (eager, ours))
    assert (found == wanted).all()


def test_images() -> None:
    """A vision transformer: no mask, as many keys as there are patches."""
    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 3, **ENCODER}
    eager, ours = pair(transformers.AutoModel, "vit", **sizes)
    image = torch.rand(2, 3, 8, 8, generator=torch.Generator(DEVICE).manual_seed(2))
    with torch.no_grad():
        close(ours(image).last_hidden_state, eager(image).last_hidden_state)


# ---- models and caches that take sdpa, in a region of monotile.torch.sdpa --------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, int]:
    """What `run` gives where torch's attention is monotile's, and how often that is called."""
    module, calls = sys.modules["monotile.torch.sdpa"], []
    monkeypatch.setattr(module, "attention", lambda *a, **o: calls.append(1) or monotile.attention(*a, **o))
    with monotile.torch.sdpa(), torch.no_grad():
        return run(), len(calls)


def test_a_model_that_chooses_classes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.CONFIG_MAPPING["falcon"](**{n: size for n, size in SIZES.items() if n != "head_dim"})
    with pytest.raises(BadOption, match="table of its own, eager, sdpa"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="monotile")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    seen = torch.ones(2, 14, dtype=torch.int64)
    seen[1, :5] = 0
    found, calls = counted(monkeypatch, lambda: model(tokens(), attention_mask=seen).logits)
    assert calls == 2
    close(found, model(tokens(), attention_mask=seen).logits.detach(), seen.bool())


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_continuous_batching(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths on a paged cache, as if each were alone, without a mask; windows and sinks too."""
    model, _ = pair(transformers.AutoModelForCausalLM, name, **DECODERS[name])
    prompts, few = [[*range(5, 17)], [9, 10, 11]], {"max_new_tokens": 4, "do_sample": False}
    alone = [model.generate(torch.tensor([p]), **few)[0, len(p) :].tolist() for p in prompts]
    limits = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, page_size=16)
    settings = transformers.GenerationConfig(**few, eos_token_id=63, pad_token_id=0)
    options = {"generation_config": settings, "continuous_batching_config": limits, "progress_bar": False}
    packed: list[int] = []
    plain = monotile.attention_varlen
    monkeypatch.setattr(paged, "attention_varlen", lambda q, *a, **o: packed.append(len(q)) or plain(q, *a, **o))
    with monotile.transformers.continuous_batching(model):
        found = model.generate_batch(prompts, **options)
    assert packed == [15, 15, *[2] * 6] and model.config._attn_implementation == "eager"
    assert [r.generated_tokens for r in sorted(found.values(), key=lambda r: -len(r.prompt_ids))] == alone


def test_a_quantised_cache() -> None:
    eager, ours = pair(transformers.AutoModelForCausalLM, "llama")
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of Transformers has no backend of a quantised cache in itself")
    cache = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    options = {"max_new_tokens": 6, "do_sample": False, **cache}
    assert ours.generate(tokens(), **options).tolist() == eager.generate(tokens(), **options).tolist()


# ---- masks -----------------------------------------------------------------------------------------------------------


def asked(function: Any, queries: int, keys: int, first: int = 0, **options: Any) -> Any:
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": first, "device": DEVICE}
    return masks.make_mask(**sizes, mask_function=function, **options)


def test_masks_become_options() -> None:
    """Causal and windowed masks are options of attention; padding is of order N; documents are a mask_mod."""
    made, llama = transformers.masking_utils, {"config": transformers.LlamaConfig()}
    assert asked(made.causal_mask_function, 9, 9, **llama) is None
    assert asked(made.causal_mask_function, 9, 9).visible == masks.Visible(9, True, None, None, None)  # of any model
    assert asked(made.causal_mask_function, 1, 9, 8) is None
    assert asked(made.bidirectional_mask_function, 9, 9, allow_is_bidirectional_skip=True) is None
    assert asked(made.causal_mask_function, 4, 9, 5).visible == masks.Visible(9, True, None, None, None)
    assert asked(made.causal_mask_function, 4, 20, 5).visible.keys == 9  # of a static cache
    windowed = asked(made.sliding_window_causal_mask_function(3), 9, 9).visible
    assert windowed == masks.Visible(9, True, (2, None), None, None)
    both = made.sliding_window_bidirectional_mask_function(3)
    assert asked(both, 9, 9).visible == masks.Visible(9, False, (3, 3), None, None)
    seen = torch.ones(2, 9, dtype=torch.bool)
    assert asked(made.causal_mask_function, 9, 9, attention_mask=seen, **llama) is None
    seen[1, :2] = False
    padded = asked(made.causal_mask_function, 9, 9, attention_mask=seen).visible
    assert padded.causal and padded.padding.shape == (2, 9) and padded.mask_mod is None
    documents = made.packed_sequence_mask_function(torch.arange(9)[None].expand(2, 9) // 4)
    packed = asked(made.and_masks(made.causal_mask_function, documents), 9, 9).visible
    assert packed.causal and packed.mask_mod is documents


def test_the_mask_of_a_step() -> None:
    """One query at the last key needs no mask as long as no token is padding, which each step looks at anew."""
    causal, windowed = (
        transformers.masking_utils.causal_mask_function,
        transformers.masking_utils.sliding_window_causal_mask_function(3),
    )
    seen = torch.ones(2, 9, dtype=torch.bool)
    assert asked(causal, 1, 9, 8, attention_mask=seen) is None
    seen[1, 4] = False
    assert (asked(causal, 1, 9, 8, attention_mask=seen).visible.padding == seen).all()
    seen[1, 4] = True
    assert asked(causal, 1, 9, 8, attention_mask=seen) is None
    assert asked(windowed, 1, 9, 8, attention_mask=seen).visible == masks.Visible(9, False, (2, None), None, None)
    assert asked(windowed, 1, 3, 2, attention_mask=seen[:, :3]) is None
    assert asked(causal, 1, 20, torch.tensor(8)).visible.keys == 9  # of a static cache
    assert asked(causal, 1, 9, 8, attention_mask=seen, allow_is_causal_skip=False).visible.hides_nothing


def test_the_mask_of_a_trace_is_dense() -> None:
    """Nothing is read of tensors that torch traces: they may be others in the next call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    causal = transformers.masking_utils.causal_mask_function
    with FakeTensorMode():
        found = asked(causal, 4, 9, 5, attention_mask=torch.ones(2, 9, dtype=torch.bool))
    assert type(found) is not masks.LazyMask and found.shape == (2, 1, 4, 9)
    traced: list[Any] = []

    def step(seen: Any) -> Any:
        traced.append(asked(causal, 4, 9, 5, attention_mask=seen))
        return traced[-1].clone()

    torch.jit.trace(step, torch.ones(2, 9, dtype=torch.bool))
    assert type(traced[0]) is torch.Tensor and traced[0].shape == (2, 1, 4, 9)


def test_a_mask_that_is_computed_with_is_dense() -> None:
    """A model may slice or combine it: then it is what Transformers makes."""
    made = transformers.masking_utils
    window = made.sliding_window_causal_mask_function(3)
    images = made.or_masks(window, made.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, 1]] * 2)))
    for function, queries, first in ((window, 9, 0), (window, 4, 5), (images, 9, 0), (images, 4, 5)):
        lazy = asked(function, queries, 9, first)
        wanted = made.sdpa_mask(2, queries, 9, first, mask_function=function, allow_is_causal_skip=False, device=DEVICE)
        assert type(lazy) is masks.LazyMask and lazy.shape == wanted.shape and "keys=9" in repr(lazy)
        assert ((lazy & True) == wanted).all() and (lazy[:, :, 1:] == wanted[:, :, 1:]).all()


def test_what_is_refused() -> None:
    _, ours = pair(transformers.AutoModelForCausalLM, "llama", attention_dropout=0.1)
    with pytest.raises(BadOption, match="no dropout"):
        ours.train()(tokens())


@pytest.mark.parametrize("name", ["bloom", "deberta", "deberta-v2", "xlm", "fsmt", "openai-gpt", "falcon", "gptj"])
def test_models_that_compute_by_themselves(name: str) -> None:
    config = transformers.CONFIG_MAPPING[name]()
    sizes = {"hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "vocab_size": 64, "src_vocab_size": 64}
    sizes |= dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers"), 1)
    sizes |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4) | {"rotary_dim": 4, "tgt_vocab_size": 64}
    for option, size in sizes.items():
        if hasattr(config, option):
            setattr(config, option, size)
    said = "table of its own" if name in ("falcon", "gptj") else "computes attention by itself"
    with pytest.raises(BadOption, match=said):
        transformers.AutoModel.from_config(config, attn_implementation="monotile")
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with pytest.raises(BadOption, match=said):
        model.set_attn_implementation(attn_implementation="monotile")
    model.set_attn_implementation("eager")


def test_a_mask_for_a_model_that_computes_by_itself() -> None:
    """Its configuration may name an implementation that Transformers did not check."""
    bloom = transformers.CONFIG_MAPPING["bloom"](**{**SIZES, "n_layer": 2, "n_head": 4})
    model = transformers.AutoModelForCausalLM.from_config(bloom, attn_implementation="eager")
    model.config._attn_implementation = "monotile"
    with pytest.raises(BadOption, match="eager"):
        model(tokens())
