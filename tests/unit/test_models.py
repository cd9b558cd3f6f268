"""A model's config.json: the attention of its layers, by the rules of the library that writes such files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import iosim
from iosim.study.models import load_model
from tests.model_configs import CONFIGS, written

TINY: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 256, "num_hidden_layers": 8}


def tiny(**fields: Any) -> dict[str, Any]:
    return TINY | fields


@pytest.mark.parametrize(
    ("name", "given", "shape", "dtype", "layers"),
    [  # heads, K/V heads, d of the models' papers and cards; kinds of layer of the whole model
        ("llama-3-8b", {}, (32, 8, 128), "bf16", {"full": 32}),
        ("mistral-7b", {}, (32, 8, 128), "bf16", {"sliding": 32}),
        ("gemma-2-9b", {}, (16, 8, 256), "bf16", {"sliding": 21, "full": 21}),
        ("qwen2.5-7b", {}, (28, 4, 128), "bf16", {"full": 28}),
        ("gpt2", {}, (12, 12, 64), None, {"full": 12}),
        ("gemma-3-4b", {"heads": 8, "kv_heads": 4}, (8, 4, 256), "bf16", {"sliding": 29, "full": 5}),
    ],
)
def test_known_models(
    name: str, given: dict[str, int], shape: tuple[int, int, int], dtype: str | None, layers: dict[str, int]
) -> None:
    model = load_model(CONFIGS[name], **given)
    assert (model.heads, model.kv_heads, model.d) == shape
    assert model.dtype == dtype
    assert Counter(model.kinds) == layers


def test_the_head_dimension_is_not_guessed_where_it_is_known() -> None:
    """Gemma-3-4B has 2560 / 8 = 320, and head dimension 256; what is given fills in what the file leaves open."""
    assert load_model(tiny()).d == 64
    assert load_model(tiny(), d=80).d == 80
    assert load_model(tiny(head_dim=80)).d == 80
    with pytest.raises(iosim.InputError, match="d: 64 was given, and config has head_dim 80"):
        load_model(tiny(head_dim=80), d=64)
    with pytest.raises(iosim.InputError, match="heads: 8 was given, and config has num_attention_heads 4"):
        load_model(tiny(), heads=8)


def test_which_layers_slide() -> None:
    """Gemma-2 begins with one that slides; every 6th of Gemma-3 is full; Qwen slides from max_window_layers on."""
    assert load_model(CONFIGS["gemma-2-9b"]).kinds[:4] == ("sliding", "full", "sliding", "full")
    gemma = load_model(CONFIGS["gemma-3-4b"], heads=8)
    assert [i for i, kind in enumerate(gemma.kinds) if kind == "full"] == [5, 11, 17, 23, 29]
    qwen = tiny(model_type="qwen2", sliding_window=64, max_window_layers=5, use_sliding_window=True)
    assert load_model(qwen).kinds == ("full",) * 5 + ("sliding",) * 3
    del qwen["use_sliding_window"]  # Qwen's default is that none slides
    assert set(load_model(qwen).kinds) == {"full"}
    assert load_model(tiny(sliding_window=64, sliding_window_pattern="LLG")).kinds == (
        "sliding", "sliding", "full", "sliding", "sliding", "full", "sliding", "full"
    )  # fmt: skip
    typed = tiny(
        sliding_window=64, sliding_window_pattern=2, layer_types=["full_attention"] * 7 + ["sliding_attention"]
    )
    assert load_model(typed).kinds == ("full",) * 7 + ("sliding",)


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"n_head_kv": 2}, 2),
        ({"multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"multi_query_attention": False, "multi_query_group_num": 2}, 4),
        ({"attn_config": {"kv_n_heads": 2}}, 2),
    ],
)
def test_older_spellings_of_kv_heads(fields: dict[str, Any], kv_heads: int) -> None:
    assert load_model(tiny(**fields)).kv_heads == kv_heads


def test_phases() -> None:
    """8 of 100 keys are hidden from the last query of a window of 92; decode sees what the last row does."""
    model = load_model(tiny(sliding_window=92))
    prefill, decode = (model.case(n=100, batch=2, phase=phase).one() for phase in ("prefill", "decode"))
    training = iosim.model_problem(model, n=100, phase="training")
    assert (prefill.n_q, prefill.n_k, prefill.causal, prefill.window, prefill.lse) == (100, 100, True, 92, False)
    assert (decode.n_q, decode.n_k, decode.pairs) == (1, 100, 92 * 2 * 4)
    assert (training.n_q, training.causal, training.lse, training.batch) == (100, True, True, 1)
    assert prefill.pairs == 2 * 4 * (sum(range(1, 93)) + 8 * 92)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["prefill", "decode", "training"]))
def test_layers_add_up_and_a_window_that_hides_nothing_is_none(n: int, window: int, phase: str) -> None:
    """Both kinds have one problem exactly when the window holds all keys."""
    case = load_model(tiny(sliding_window=window, sliding_window_pattern=4)).case(n=n, phase=phase)
    assert case.count == 8
    assert (len(case.layers) == 1) == (window >= n)
    assert case.hidden_nothing == (6 if window >= n else 0)
    assert case.kv_bytes == 8 * 2 * 4 * n * 64 * 2
    pairs = [part.problem.pairs for part in case.layers]
    assert pairs == sorted(pairs, reverse=True)  # full layers first, and they see no less


def test_an_encoder_has_no_causal_mask() -> None:
    model = load_model(tiny(model_type="bert"))
    assert not model.case(n=10).one().causal
    with pytest.raises(iosim.InputError, match=r"phase: config is an encoder \(bert\)"):
        model.case(n=10, phase="decode")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"num_attention_heads": None},
            "num_attention_heads: missing (or n_head, n_heads, num_heads); --heads gives it",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing (or n_layer, n_layers, num_layers)"),
        ({"hidden_size": None}, "head_dim: missing (or kv_channels, hidden_size, n_embd); --d gives it"),
        ({"hidden_size": None, "hiden_size": 9}, "(is it 'hiden_size'?); --d gives it"),
        ({"num_attention_heads": "4"}, 'num_attention_heads: "4" is not a whole number'),
        ({"num_attention_heads": True}, "num_attention_heads: true is not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is out of range; 1 to 65536 is allowed"),
        ({"n_head": 8}, "n_head: 8 contradicts num_attention_heads, which is 4"),
        ({"hidden_size": 250}, "hidden_size: 250 is not a multiple of the 4 heads"),
        ({"hidden_size": 2**20}, "a head dimension is at most 1024"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 4 heads"),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8' is not one of fp16, bf16, fp32, fp8_e4m3"),
        ({"layer_types": ["full_attention"]}, "layer_types: 1 entries, and there are 8 layers"),
        ({"layer_types": "full_attention"}, 'layer_types: "full_attention" is not a list of texts'),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window: missing, and layer_types has sliding_attention"),
        ({"sliding_window": 9, "use_sliding_window": "no"}, 'use_sliding_window: "no" is not true or false'),
        ({"sliding_window": 9, "sliding_window_pattern": 0}, "sliding_window_pattern: 0 is neither a whole number"),
        ({"sliding_window": -1}, "sliding_window: -1 is out of range"),
        ({"sliding_window": 9, "model_type": "bert"}, "sliding_window: a window to both sides"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: latent attention has qk_nope_head_dim, qk_rope_head_dim and v_head_dim"),
        ({"mamba_d_state": 16}, "mamba_d_state: state-space layers, which iosim has no program for"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: chunked attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: cross-attention"),
        ({"model_type": 7}, "model_type: 7 is not a text"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(iosim.InputError) as error:
        load_model(tiny(**fields))
    assert str(error.value).startswith("config: config: ")
    assert words in str(error.value)


def test_nested_fields_are_named_as_they_stand() -> None:
    with pytest.raises(iosim.InputError, match=r"text_config\.num_attention_heads: missing"):
        load_model(CONFIGS["gemma-3-4b"])


def test_latent_attention_is_plain_in_prefill_and_one_head_in_decoding() -> None:
    """DeepSeek-V3: 128 + 64 and 128 a head, of a latent of 512 + 64, which is all that the cache has."""
    model = load_model(CONFIGS["deepseek-v3"])
    prefill, decode = model.case(n=4096), model.case(n=4096, batch=3, phase="decode")
    wanted = iosim.Attention(n_q=4096, d=192, d_v=128, heads=128, causal=True)
    assert prefill.one() == wanted
    assert decode.one() == iosim.Attention(n_q=1, n_k=4096, d=576, d_v=512, heads=128, kv_heads=1, batch=3)
    assert prefill.kv_bytes == 61 * 4096 * 576 * 2
    assert decode.kv_bytes == 3 * prefill.kv_bytes
    with pytest.raises(iosim.InputError, match=r"d: 56 was given, and heads of config have 128 \+ 64"):
        load_model(CONFIGS["deepseek-v3"], d=56)


def test_what_an_option_models_is_not_said_to_be_left_out() -> None:
    model = load_model(CONFIGS["gemma-2-9b"])
    assert model.case(n=64).not_modelled == ("soft-capped scores",)
    capped = model.case(n=64, softcap=50.0)
    assert capped.not_modelled == ()
    assert {layers.problem.softcap for layers in capped.layers} == {50.0}


def test_layers_of_other_kinds_are_left_out_by_name() -> None:
    model = load_model(tiny(layer_types=["linear_attention"] * 6 + ["full_attention"] * 2, linear_num_key_heads=16))
    with pytest.raises(iosim.InputError, match=r"6 of 8 layers are 'linear_attention'.*--layers full leaves them out"):
        model.case(n=64)
    assert model.case(n=64, layers="full").count == 2


def test_several_problems_are_not_one() -> None:
    with pytest.raises(iosim.InputError, match="has 21 full and 21 sliding layers"):
        iosim.model_problem(CONFIGS["gemma-2-9b"], n=8192)
    assert iosim.model_problem(CONFIGS["gemma-2-9b"], n=8192, layers="sliding").window == 4096


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON: Expecting value"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "is not a JSON object, but [1]"),
        (b'{"n_head": NaN}', "NaN is no number of JSON"),
        (b'{"n_head": 1, "n_head": 2}', '"n_head" is there twice'),
        (b" " * (2**20 + 1), "1048577 bytes; a config.json has at most 1048576"),
        (b"{}", "num_attention_heads: missing"),
        (b'{"n_head": ' + b"9" * 5000 + b"}", "is"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(iosim.InputError) as error:
        load_model(tmp_path)  # the directory of a checkpoint
    assert str(error.value).startswith(f"config: {path}: ")
    assert words in str(error.value)
    assert len(str(error.value)) < 400


def test_a_file_and_its_content_are_the_same_model(tmp_path: Path) -> None:
    path = written(tmp_path, "mistral-7b")
    assert load_model(path).case(n=8192).layers == load_model(json.loads(Path(path).read_text())).case(n=8192).layers


def test_totals_are_sums_over_layers() -> None:
    """The total of a hybrid model is 6 times one kind and 2 times the other, in each number."""
    case = load_model(tiny(sliding_window=64, sliding_window_pattern=4)).case(n=256)
    found = iosim.compare_model(case, check=False, dataflows="flash2")
    counts = {part.kind: part.count for part in case.layers}
    assert counts == {"full": 2, "sliding": 6}
    (total,) = found.totals
    runs = {part.kind: r for part, r in zip(case.layers, found.runs, strict=True)}
    assert runs["sliding"].problem.window == 64
    assert total.layers == 8
    assert total.hbm_read_bytes == 2 * runs["full"].ledger.hbm_read_bytes + 6 * runs["sliding"].ledger.hbm_read_bytes
    times = {kind: r.timeline.makespan_ps for kind, r in runs.items() if r.timeline is not None}
    assert total.picoseconds == 2 * times["full"] + 6 * times["sliding"]
    assert total.flops == sum(part.count * part.problem.flops for part in case.layers)
    alone = iosim.compare(runs["full"].problem, check=False, dataflows="flash2").runs[0].timeline
    assert alone is not None
    assert alone.makespan_ps == times["full"]
