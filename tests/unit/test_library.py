"""How a library picks its kernels (iosim/kernels/library.py), held against the kernels that ran on an H200."""

from __future__ import annotations

import csv
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.interpreters.ledger import ledger
from iosim.kernels import load_kernel
from iosim.memory.cache import dram_flows
from iosim.memory.counters import H200_DIRTY, with_dirty_lines
from iosim.memory.onchip import footprints
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule
from iosim.study.choose import choose
from tests.dataflow_checks import assert_close, backward, forward, outputs

H200 = load_hardware("h200-sxm")
PRODUCTS = {"fwd": ("scores", "output"), "bwd": ("dV", "dP", "dK", "dQ")}


def table(name: str) -> list[dict[str, str]]:
    with (files("iosim.data") / name).open() as file:
        return list(csv.DictReader(file))


def schedule(name: str, a: Attention) -> Schedule:
    return choose(load_kernel(name).dataflow(), a, H200, {})[0]


def counted_products() -> list[tuple[str, Attention, str, tuple[int, int], int]]:
    """(kernel file, problem, kernel, its tile as a library names it, stages) of each product longer than 10 us."""
    out, before = [], {}  # type: ignore[var-annotated]
    for r in table("h200_counters.csv"):
        found = re.search(r"_hsh_(\d+)x(\d+)_\d+x(\d+)_", r["kernel"])
        if not found:
            continue
        key = tuple(r[name] for name in ("pass", "batch", "heads", "n", "d"))
        number = before[key] = before.get(key, -1) + 1
        if float(r["us"]) > 10:
            a = Attention(batch=int(r["batch"]), heads=int(r["heads"]), n_q=int(r["n"]), d=int(r["d"]))
            name = {"fwd": "standard", "bwd": "standard-backward"}[r["pass"]]
            tile = int(found[1]), int(found[2])
            out.append((name, a, PRODUCTS[r["pass"]][number], tile, int(found[3])))
    return out


@pytest.mark.parametrize(("name", "a", "kernel", "named", "stages"), counted_products())
def test_tiles_of_products_are_those_that_ran(
    name: str, a: Attention, kernel: str, named: tuple[int, int], stages: int
) -> None:
    own = schedule(name, a).of(kernel)
    (product,) = (k for k in load_kernel(name).dataflow()(a, schedule(name, a)).kernels if k.name == kernel)
    tile = next(
        node.tile for node in product.body if hasattr(node, "view") and node.tile.name in ("s", "o", "x", "out")
    )
    assert sorted(tile.shape) == sorted(named)  # cuBLAS names rows and columns of the transposed result
    assert own.stages == (stages,) or (min(named) < 64 and own.stages[0] >= stages) or own.stages[0] == 13


@pytest.mark.parametrize("row", table("h200_softmax.csv"), ids=lambda r: r["n"])
def test_softmax_kernels_are_those_that_ran_and_take_the_counted_instructions(row: dict[str, str]) -> None:
    """The instructions of a row are within 6 % of the counted ones; blocks, threads and residence are exact."""
    n, warps = int(row["n"]), int(row["block"]) // 32
    a = Attention(n_q=int(row["rows"]), n_k=n, d=64)
    s = schedule("standard", a)
    own = s.of("softmax")
    each = own.softmax_rows
    print_ = footprints(load_kernel("standard").dataflow()(a, s), s, H200)["softmax"]
    assert print_.threads == int(row["block"])
    assert -(-a.n_q // each) == int(row["grid"])
    assert print_.resident * warps / 64 >= float(row["warps_active_pct"]) / 100 - 0.01
    kind = next(k for k in load_kernel("standard").file.kernels["softmax"].row if n <= k.most)
    c, tail = kind.counted, n % 8192 if kind.cols < n else 0
    lanes = 32 * warps // each
    counted = c.lane * lanes + c.place * kind.places + c.element * n + c.tail * tail
    assert counted / 32 * a.n_q == pytest.approx(int(row["inst"]), rel=0.06)
    special = kind.special * n + kind.special_place * kind.places
    assert special / 32 * a.n_q == pytest.approx(int(row["xu_inst"]), rel=0.05)


def test_kernels_of_a_file_are_kernels_of_its_dataflow(tmp_path: Path) -> None:
    text = (files("iosim.kernels") / "standard.toml").read_text().replace("[kernels.scale]", "[kernels.scail]")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"standard has no kernel 'scail' .*scale, scores.*\(did you mean 'scale'\?\)"):
        choose(load_kernel(str(path)).dataflow(), Attention(n_q=512, d=64), H200, {})
    path.write_text('like = "standart"\n')
    with pytest.raises(InputError, match="like: 'standart' is not one of"):
        load_kernel(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"separate": ("skale",)}, "separate: 'skale' is not one of"),
        ({"dram_share": 0.0}, "dram_share: 0.0 is not above 0"),
        ({"kernels": {"scores": {"block_qq": 1}}}, "kernels: scores: 'block_qq' is no field"),
        ({"band": 0}, "band"),
    ],
)
def test_fields_of_single_kernels_are_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(block_q=64, block_k=64, **fields)  # type: ignore[arg-type]


def test_a_kernel_has_its_own_fields_and_the_others_of_the_whole() -> None:
    s = Schedule(block_q=64, block_k=32, groups=2, kernels={"output": {"block_q": 128}})
    assert (s.of("output").block_q, s.of("output").block_k, s.of("output").groups) == (128, 32, 2)
    assert s.of("scores") == s


# ---------------------------------------------------------------- values


SHAPES = (
    Attention(n_q=200, n_k=331, d=40, heads=4, kv_heads=2, batch=2, causal=True, lse=True),
    Attention(n_q=512, d=64),
)
SEPARATE = {"standard": ("scale", "copy", "mask"), "standard-backward": ("product", "copy", "scale")}


def inputs(program: Program, a: Attention) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    random = np.random.default_rng(0)
    drawn = {t.name: random.standard_normal(t.shape).astype(np.float16).astype(float) for t in program.tensors
             if t.role == "in"}  # fmt: skip
    if "P" in drawn:
        drawn["P"] = forward(a, drawn | {"V": drawn["V"]})["P"].astype(np.float16).astype(float)
    return drawn


@pytest.mark.parametrize("a", SHAPES, ids=["ragged", "square"])
@pytest.mark.parametrize("name", SEPARATE)
def test_kernels_of_their_own_and_bands_change_no_result(name: str, a: Attention) -> None:
    s = Schedule(block_q=64, block_k=64, softmax_rows=2, softmax_cols=a.n_k, separate=SEPARATE[name], band=4)
    program = load_dataflow(name)(a, s)
    drawn = inputs(program, a)
    exact = forward(a, drawn) if name == "standard" else backward(a, drawn)
    for tensor, got in outputs(program, drawn).items():
        assert_close(a, got, exact[tensor], roundings=64, name=tensor)
    assert {"scale", "copy K" if name == "standard" else "copy"} <= {k.name for k in program.kernels}


# ---------------------------------------------------------------- traffic


def test_a_cluster_keeps_no_replica_of_what_its_blocks_share() -> None:
    """Two columns of blocks read X, twice.  It is half of the cache: with replicas for both of its halves it does not
    stay, with replicas for the half that asks it takes three quarters, and stays."""
    p = Builder("pairs")
    X = p.tensor("X", (64 * 256, 64), "fp16", "in")
    O = p.tensor("O", (64 * 256, 2), "fp16", "out")
    with p.kernel("read", again=2, i=256, c=2) as (_, i, c):
        x = p.load("x", X[rows(i, 64)])
        p.store(O[rows(i, 64), rows(c, 1)], p.rowsum("s", x))
    program = p.done()

    def read(cluster: int) -> int:
        size, pairs = int(X.bytes / 0.52), {"read": {"x": cluster}}
        moved = dram_flows(program, ledger(program), size, {"read": 4}, partitions=2, multicast=pairs)
        assert moved.l2_read_bytes == 4 * X.bytes // cluster
        return moved.dram_read_bytes

    assert X.bytes <= read(2) < 1.5 * X.bytes < read(1) <= 2 * X.bytes


def test_dirty_lines_are_moved_between_kernels_and_nothing_is_lost() -> None:
    a = Attention(heads=4, n_q=1024, d=64)
    s = Schedule(block_q=128, block_k=128, softmax_cols=1024)
    program = load_dataflow("standard")(a, s)
    resident = {k.name: 132 for k in program.kernels}
    plain = dram_flows(program, ledger(program), 62_914_560, resident, partitions=2)
    shown = with_dirty_lines(plain, H200_DIRTY)
    moved = [plain.of_kernel(k.name) for k in program.kernels]
    counted = H200_DIRTY.counted(moved)
    for kernel, expected in zip(program.kernels, counted, strict=True):
        assert shown.of_kernel(kernel.name)[1] == pytest.approx(expected, abs=1)
    assert shown.dram_read_bytes == plain.dram_read_bytes


def test_the_dirty_share_of_another_cache_is_the_same() -> None:
    half = H200_DIRTY.of(H200_DIRTY.cache_bytes // 2)
    assert half.most_bytes * 2 == pytest.approx(H200_DIRTY.most_bytes)
