"""Peak memory of known libraries, and their split rules, against measured calls and counted kernels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files

import pytest

from iosim.dataflows.split_rules import cudnn_splits, flash2_splits
from iosim.index import cdiv
from iosim.memory.peak import EXTRA, held_bytes, peak_extra_bytes, peak_total_bytes, splits
from iosim.problem import Attention
from iosim.study.validate import shipped_rows
from iosim.study.validate.readers import read
from iosim.study.validate.rows import Row

SMS = 132  # of an H200
ROWS = shipped_rows()
CALLS = [r for r in ROWS if "peak_extra_bytes" in r.measured]


def shape(row: Row) -> Attention:
    assert row.problem is not None
    return row.problem


with as_file(files("iosim.data").joinpath("h200_other_shapes.csv")) as path:
    OTHERS = read(path, ())


@pytest.mark.parametrize(("calls", "number"), [(CALLS, 181), (OTHERS, 86)], ids=["shipped", "other shapes"])
def test_all_measured_calls_to_the_byte(calls: Sequence[Row], number: int) -> None:
    assert len(calls) == number
    wrong = {
        r.where: (r.measured["peak_extra_bytes"], found)
        for r in calls
        if (found := peak_extra_bytes(r.implementation, r.direction, shape(r), SMS)) != r.measured["peak_extra_bytes"]
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("implementation", "problem", "measured"),
    [
        ("flash2", {"n_q": 4096, "d": 128, "heads": 32, "kv_heads": 8}, 201_850_880),
        ("flash2", {"n_q": 2048, "d": 128, "batch": 4, "heads": 32, "kv_heads": 4, "causal": True}, 403_701_760),
        ("cudnn", {"n_q": 4096, "d": 128, "heads": 32, "kv_heads": 8}, 134_742_528),
    ],
)
def test_backward_of_grouped_heads_to_the_byte(implementation: str, problem: dict[str, int], measured: int) -> None:
    """By `iosim measure` on an H200: dK and dV of every query head are held before they are summed over a group."""
    assert peak_extra_bytes(implementation, "backward", Attention(**problem), SMS) == measured


def test_table_21_of_the_first_paper_in_whole_mib() -> None:
    rows = [r for r in ROWS if "peak_bytes" in r.measured]
    assert len(rows) == 16
    for r in rows:
        found = peak_total_bytes(r.implementation, r.direction, shape(r))
        assert found is not None
        assert found // 2**20 == r.measured["peak_bytes"] / 2**20, r.where


def test_flash2_splits_are_the_grids_that_the_hardware_counted() -> None:
    """A split kernel launches batch x heads x ceil(N/64) x splits blocks; the plain one ceil(N/128) a head."""
    kernels = [(r, r.kernel) for r in ROWS if r.kernel is not None and r.implementation == "flash2"]
    forward = [(r, k) for r, k in kernels if k.role in ("split", "attention") and r.direction == "forward"]
    assert {k.role for _, k in forward} == {"split", "attention"}
    for r, k in forward:
        a = shape(r)
        s = flash2_splits(a, SMS)
        assert (s > 1) == (k.role == "split"), r.where
        assert k.grid == a.batch * a.heads * (cdiv(a.n_q, 64) * s if s > 1 else cdiv(a.n_q, 128)), r.where


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        # 8 query tiles, 2 key tiles of 256: splits 1 and 2 fill 8 and 16 of 264 slots; 2 is best, 1 below 85 % of it.
        ({"n_q": 512, "d": 64}, 2),
        # 211 blocks are below 80 % of 264 (211.2).  1 to 3 splits fill 0.799 (211 / 264), 4 splits 844 / 1056 = 0.799;
        # 5 splits 1055 / 1056 = 0.999, of which 85 % is 0.849.  5 splits leave 7 of 32 key tiles each, 4 leave 8.
        ({"n_q": 64, "n_k": 4096, "d": 128, "heads": 211}, 5),
        ({"n_q": 64, "n_k": 4096, "d": 128, "heads": 212}, 1),  # 212 blocks are more than 80 %
        ({"n_q": 64, "n_k": 64, "d": 128}, 1),  # one key tile cannot be split
        # Grouped heads of one query are rows of one tile: 8 blocks, 1024 key tiles of 128.  33 splits would fill 264
        # slots, but leave 32 tiles each as 32 splits do (256 / 264 = 0.970, the best; 85 % of it is 0.824).  28 splits
        # fill 224 (0.848) and leave 37 tiles where 27 leave 38.
        ({"n_q": 1, "n_k": 131072, "d": 128, "heads": 32, "kv_heads": 8}, 28),
    ],
)
def test_flash2_rule_by_hand(problem: dict[str, int], expected: int) -> None:
    assert flash2_splits(Attention(**problem), SMS) == expected


def test_cudnn_splits_only_one_query_and_in_powers_of_two() -> None:
    decode = {"n_q": 1, "n_k": 8192, "d": 128}
    assert cudnn_splits(Attention(**decode, heads=32), SMS) == 8  # 8 x 32 = 256 of 264 slots
    assert cudnn_splits(Attention(**decode, heads=265), SMS) == 1  # no slot to spare
    assert cudnn_splits(Attention(n_q=2, n_k=8192, d=128), SMS) == 1


def test_a_call_without_a_list_is_none_and_its_splits_are_one() -> None:
    a = Attention(n_q=1, n_k=8192, d=128)
    assert peak_extra_bytes("efficient", "backward", a, SMS) is None
    assert peak_total_bytes("flash2", "both", a) is None
    assert splits("standard", "forward", a, None) == 1


def test_each_tensor_takes_whole_granules() -> None:
    """One row of d=3 in fp16 is 6 bytes; O, L, seed and offset take 512 each."""
    a = Attention(n_q=1, d=3)
    assert held_bytes(EXTRA["flash2", "forward"], a) == {"O": 512, "L": 512, "seed": 512, "offset": 512}
