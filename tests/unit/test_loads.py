"""How often the keys and values of grouped queries are loaded."""

from __future__ import annotations

import jsonschema
import pytest

from iosim.dataflows import load_dataflow
from iosim.interpreters.ledger import ledger
from iosim.memory.cache import dram_flows
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule
from iosim.study.loads import Loads, key_loads
from tests.cli.test_run import SCHEMA, document
from tests.conftest import Iosim

GROUPED = Attention(n_q=256, d=64, heads=6, kv_heads=2, batch=2)
TILES = Schedule(block_q=64, block_k=32, block_d=64)


def loads(program: Program, a: Attention = GROUPED) -> dict[str, Loads]:
    return key_loads(a, program, dram_flows(program, ledger(program), None, {}))


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        ("flash2", 12, 12),  # 3 heads of 256 / 64 query tiles
        ("flash1", 3, 3),  # once a head
        ("standard", 12, 12),  # 3 heads of 4 query tiles; as many output tiles, each 32 wide: V by columns
        ("flash-backward", 3, 3),  # once a head, as a block keeps its keys
        ("standard-backward", 12, 12),  # K for dQ, V for dP
    ],
)
def test_every_query_head_loads_them_anew(name: str, k: int, v: int) -> None:
    found = loads(load_dataflow(name)(GROUPED, TILES))
    assert found == {"K": Loads(k, k, True), "V": Loads(v, v, True)}


def test_without_groups_there_is_nothing_to_say() -> None:
    a = Attention(n_q=256, d=64, heads=6)
    assert loads(load_dataflow("flash2")(a, TILES), a) == {}
    assert loads(load_dataflow("softmax-safe")(GROUPED, TILES)) == {}


def once(*, inside: bool) -> Program:
    """K is loaded inside of a loop over the query heads of a group, or before it."""
    a, p = GROUPED, Builder("once")
    Q = p.tensor("Q", (a.batch, a.heads, 256, 64), "fp16", "in")
    K = p.tensor("K", (a.batch, a.kv_heads, 256, 64), "fp16", "in")
    S = p.tensor("S", (a.batch, a.heads, 256, 256), "fp16", "out")
    with p.kernel("scores", b=a.batch, kv=a.kv_heads, j=4) as (b, kv, j):
        if not inside:
            k = p.load("k", K[b, kv, rows(j, 64)])
        with p.loop("g", 0, a.group) as g:
            if inside:
                k = p.load("k", K[b, kv, rows(j, 64)])
            q = p.load("q", Q[b, kv * a.group + g, rows(j, 64)])
            with p.phase("qk"):
                x = p.matmul("x", q, k.T)
            p.store(S[b, kv * a.group + g, rows(j, 64), rows(j, 64)], x)
    return p.done()


@pytest.mark.parametrize("inside", [True, False])
def test_a_load_before_the_loop_over_heads_serves_the_group(inside: bool) -> None:
    times = 3 if inside else 1
    assert loads(once(inside=inside)) == {"K": Loads(times, times, inside)}


def test_the_command_says_so(iosim: Iosim) -> None:
    """64 x 64 tiles, causal: query tile i of 4 loads i + 1 key tiles, 2.5 on average, for each of 3 heads."""
    args = ("run", "-n", "256", "-d", "64", "-H", "6", "--kv-heads", "2", "--causal", "--no-check", "--dataflow",
            "flash2", "--block-q", "64", "--block-k", "64")  # fmt: skip
    words = "flash2 loads each byte 7.50 times, anew for each of the 3 query heads of a group, 1.00 of them from DRAM."
    assert words in " ".join(iosim(*args).out.split())
    found = document(iosim, *args)
    jsonschema.validate(found, SCHEMA)
    expected = {"hbm_loads": 7.5, "dram_loads": 1.0, "per": "query head"}
    assert found["runs"][0]["traffic"]["kv_loads"] == {"K": expected, "V": expected}
    assert "kv_loads" not in document(iosim, "run", "-n", "256", "-d", "64", "--no-check")["runs"][0]["traffic"]
