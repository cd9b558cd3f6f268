"""The report of latent attention: bytes and products by hand, and what a user gets who asks for what there is not."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from iosim.hardware import load_hardware
from iosim.study.latent import LatentStudy, latent
from iosim.study.models import Latent
from tests.conftest import Iosim

SIZES = Latent(rank=512, nope=128, rope=64, value=128)


@pytest.fixture(scope="module")
def study() -> LatentStudy:
    return latent(SIZES, 128, 1, [512], 128, load_hardware("h200-sxm"))


def test_bytes_of_the_cache_and_of_a_step(study: LatentStudy) -> None:
    """A token is 576 numbers as a latent, 128 heads of 192 + 128 expanded; 64 of the 128 heads read it at one time."""
    absorbed, expanded, anew = study.decode
    tokens = 512
    assert [f.form for f in study.decode] == ["absorbed", "expanded", "anew"]
    assert (absorbed.cache_bytes, expanded.cache_bytes, anew.cache_bytes) == (1152, 81920, 1152)
    assert (absorbed.asked_bytes, absorbed.dram_bytes) == (2 * tokens * 1152, tokens * 1152)
    assert expanded.asked_bytes == anew.asked_bytes == expanded.dram_bytes == tokens * 81920
    assert [(f.form, f.queries, f.run.dataflow.name) for f in study.prefill] == [
        ("absorbed", 128, "mla"),
        ("anew", 128, "flash2"),
    ]


def test_products_by_hand(study: LatentStudy) -> None:
    """A latent and 128 heads of 128 + 128 numbers: 2 * 512 * 32,768 FLOPs; weights of 512 x 32,768 in 2 bytes."""
    absorbed, expanded, anew = study.decode
    each, weights = 2 * 512 * 32768, 512 * 32768
    assert absorbed.products.flops == expanded.products.flops == each  # of one new token, or query
    assert anew.products.flops == 512 * each
    assert absorbed.products.bytes == 2 * (weights + 128 * (128 + 512 + 512 + 128))
    assert expanded.products.bytes == 2 * (weights + 512 + 32768)
    assert anew.products.bytes == 2 * (weights + 512 * (512 + 32768))
    assert absorbed.products.seconds == pytest.approx(absorbed.products.bytes / (4800e9 * 0.9675))
    assert anew.products.seconds == pytest.approx(anew.products.flops / 989.4e12, rel=1e-3)


def test_absorbing_is_for_decoding(study: LatentStudy) -> None:
    """The latent saves bytes; a prefill pays with (576 + 512) / (192 + 128) times the FLOPs."""
    absorbed, expanded, _ = study.decode
    assert absorbed.seconds is not None
    assert expanded.seconds is not None
    assert absorbed.seconds < expanded.seconds
    flops = [f.run.problem.flops for f in study.prefill]
    assert flops[0] / flops[1] == (576 + 512) / (192 + 128)
    assert (study.prefill[0].seconds or 0) > (study.prefill[1].seconds or 0)


CONFIG = {
    "model_type": "deepseek_v3", "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 1024,
    "num_hidden_layers": 2, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_model_gives_the_sizes(iosim: Iosim, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    common = ("report", "latent", "--config", str(file), "--n-k", "256", "-n", "64")
    answer = iosim(*common, "--csv")
    assert answer.code == 0, answer.err
    rows = list(csv.DictReader(answer.out.splitlines()))
    assert {(r["form"], r["cache_bytes"]) for r in rows if r["table"] == "decode"} == {
        ("absorbed", str(2 * (256 + 32))),
        ("expanded", str(2 * 8 * (64 + 32 + 64))),
        ("anew", str(2 * (256 + 32))),
    }
    assert iosim(*common, "--rank", "128").err.startswith("iosim: --rank and --config: give one of them")
    file.write_text(json.dumps({k: v for k, v in CONFIG.items() if "_dim" not in k and "lora" not in k}))
    refused = iosim(*common)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "has no latent attention (kv_lora_rank)" in refused.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--n-k", "0"), "--n-k: 0 is out of range"),
        (("--rank", "1024", "--rope", "64"), "d: 1088 is out of range"),
        (("--dtype", "fp8"), "dtype: mla is not written for fp8"),
        (("--hw", "h201"), "hw: unknown machine 'h201'"),
    ],
)
def test_bad_input_is_one_line(iosim: Iosim, args: tuple[str, ...], words: str) -> None:
    answer = iosim("report", "latent", *args)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert words in answer.err
