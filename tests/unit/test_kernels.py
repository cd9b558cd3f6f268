"""Kernels that people run: their files, their schedules, and a few of their measured times."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest

from iosim import Attention, compare, run
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.kernels import kernel_names, load_kernel
from iosim.memory.triton import registers, serial_cycles
from iosim.study.choose import choose
from iosim.study.validate import shipped_rows
from iosim.study.validate.readers import read
from iosim.study.validate.rows import Row
from iosim.study.validate.times import predicted_time

H200 = load_hardware("h200-sxm")


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_computes_what_its_dataflow_does(name: str) -> None:
    machine = "mp31" if name == "mp31" else "h200-sxm"
    problem = Attention(n_q=300, d=64, heads=2, causal=name != "flash1-parts")  # which has no mask with several parts
    done = compare(problem, dataflows=load_kernel(name).dataflow(), hardware=machine)
    (run,) = done.runs
    assert run.check is not None
    assert run.check.status == "passed", run.check.detail
    assert run.seconds


@pytest.mark.parametrize(
    ("kernel", "d", "tile", "sram"),
    [
        ("flash2", 64, (128, 128), 49152),  # launch__shared_mem_per_block 50176 with 1 KiB of the driver
        ("flash2", 128, (128, 64), 65536),  # 66560
        ("flash2", 256, (64, 64), 98304),  # 99328
        ("mp31", 128, (256, 64), 163840),  # 160 KiB, P included
    ],
)
def test_a_block_takes_the_sram_that_was_counted(kernel: str, d: int, tile: tuple[int, int], sram: int) -> None:
    machine = load_hardware("mp31") if kernel == "mp31" else H200
    problem = Attention(n_q=4096, d=d, heads=32)
    (run,) = compare(problem, dataflows=load_kernel(kernel).dataflow(), hardware=machine, check=False).runs
    assert (run.schedule.block_q, run.schedule.block_k) == tile
    assert run.footprint.sram_bytes == sram


def test_a_small_grid_is_split_and_a_large_one_is_not() -> None:
    flow = load_kernel("flash2").dataflow()
    splits = {n: choose(flow, Attention(n_q=n, d=64), H200, {})[0].splits for n in (512, 4096, 32768)}
    assert splits == {512: 2, 4096: 4, 32768: 1}  # grids of 16, 256 and 256 blocks in h200_counters.csv


@pytest.mark.slow
def test_flash1_has_two_blocks_a_processor_and_its_release_shares_heads() -> None:
    """255 registers of 128 threads are half of all; K and V are there, in SRAM are two of Q and the sums of O."""
    a100, a = load_hardware("a100-sxm-80gb"), Attention(batch=16, heads=8, n_q=1024, d=64)
    (old,) = compare(a, dataflows=load_kernel("flash1").dataflow(), hardware=a100, check=False).runs
    assert (old.schedule.block_q, old.schedule.block_k, old.schedule.splits) == (16, 256, 1)
    assert old.program.kernels[0].blocks == 16 * 8
    assert (old.footprint.resident, old.footprint.limit) == (2, "registers")
    assert old.footprint.items == {"q x2": 2 * 16 * 64 * 2, "y": 16 * 64 * 4}
    (new,) = compare(a, dataflows=load_kernel("flash1-parts").dataflow(), hardware=a100, check=False).runs
    # 128 and 2 x 128 blocks in 216 slots fill 59 % of their waves, 3 x 128 89 %, 4 x 128 79 %, 5 x 128 99 %
    assert new.schedule.splits == 5
    assert new.program.kernels[0].blocks == 5 * 16 * 8
    with pytest.raises(InputError, match=r"causal: kernel flash1-parts has no tile for d 64 with a causal mask and 5"):
        choose(load_kernel("flash1-parts").dataflow(), replace(a, causal=True), a100, {})


def test_the_parts_of_a_head_read_all_keys_and_their_own_queries() -> None:
    """Each of 3 parts has 7 of 20 query tiles, the last one 6: all queries for each key tile, K and V three times."""
    a = Attention(n_q=320, d=64, heads=2)
    tile = 2 * 64  # bytes of a row
    for parts in (1, 3):
        moved = run(a, dataflow="flash1", schedule={"block_q": 16, "block_k": 64, "splits": parts}).ledger.by_tensor
        assert moved["K"]["read"] == moved["V"]["read"] == parts * 2 * 320 * tile
        assert moved["Q"]["read"] == moved["O"]["write"] == 5 * 2 * 320 * tile


def test_a_given_field_is_taken_before_the_authors() -> None:
    s, why = choose(load_kernel("triton").dataflow(), Attention(n_q=4096, d=64), H200, {"stages": (1,), "block_q": 64})
    assert (s.stages, s.block_q, s.block_k) == ((1,), 64, 64)
    assert "given" in why
    assert s.orders["j"].slots == {"k": 1, "v": 1}


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "mine.toml"
    head = 'schema = "iosim.kernel/1"\nname = "mine"\ntitle = "m"\ndataflow = "flash2"\nsource = "s"\n'
    for text, words in (
        ("", "schema"),
        (head, "tile"),
        (head + "[[tile]]\nblok_q = 64\n", "'blok_q' is no field of a schedule .did you mean 'block_q'"),
        ("x = [", "mine.toml"),
        (head + "[settings]\ncycles = 3\n[[tile]]\nblock_q = 64\nblock_k = 64\n", "cycles: 3 is no table"),
        (head + "[settings.cycles]\nmask = -1\n[[tile]]\nblock_q = 64\nblock_k = 64\n", "cycles of mask: -1 is not"),
        (
            head
            + '[[tile]]\n[[order]]\nloop = "j"\nslots = {}\n[[order.roles]]\nname = "w"\nsteps = [["run", "k", "x"]]\n',
            "steps",
        ),
    ):
        bad.write_text(text)
        with pytest.raises(InputError, match=words):
            choose(load_kernel(str(bad)).dataflow(), Attention(n_q=64, d=64), H200, {})
    with pytest.raises(InputError, match=r"'flsh2' is not one of .* \(did you mean 'flash2'\?\)"):
        load_kernel("flsh2")
    with pytest.raises(InputError, match="takes head dimensions up to 256, not 512"):
        choose(load_kernel("flash2").dataflow(), Attention(n_q=64, d=512), H200, {})


def test_serialised_products_and_estimated_registers() -> None:
    a = Attention(n_q=4096, d=128)
    assert serial_cycles(a, 64, 64, 4) == {}  # one accumulator
    assert serial_cycles(a, 128, 64, 4) == {"qk": 2 * 8 * 31, "pv": 2 * 4 * 31}  # 2 x (64 + 128) / 2 registers
    assert registers(a, 64, 32, 3, 4)[1] == 0
    held, spilled = registers(a, 256, 128, 2, 4)
    assert held == 255
    assert spilled > 200  # 562 in the sweep


def row(n: int, d: int, implementation: str, *, causal: bool = False) -> Row:
    for r in shipped_rows():
        own = (r.kind, r.implementation, r.direction) == ("calls", implementation, "forward")
        if own and (a := r.problem) and (a.n_q, a.d, a.causal) == (n, d, causal) and a.heads * a.batch > 16:
            return r
    raise AssertionError("no such row")


@pytest.mark.parametrize(
    ("n", "d", "implementation", "causal"),
    [
        (4096, 64, "flash2", False),
        (1024, 128, "flash2", True),
        (4096, 128, "cudnn", False),
        (1024, 64, "cudnn", True),
    ],
)
def test_measured_calls_are_predicted_within_15_percent(n: int, d: int, implementation: str, causal: bool) -> None:
    measured = row(n, d, implementation, causal=causal)
    assert predicted_time(measured, H200) == pytest.approx(measured.measured["time"], rel=0.15)


@pytest.mark.long
def test_decode_calls_that_the_model_has_not_seen() -> None:
    """38 calls of one query on an H200: what a flush left dirty is written meanwhile, and counts."""
    with as_file(files("iosim").joinpath("data", "h200_decode.csv")) as path:
        rows = [row for row in read(path) if row.problem is not None]
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.implementation, []).append(predicted_time(row, H200) / row.measured["time"] - 1)
    assert {name: len(own) for name, own in errors.items()} == {"flash2": 19, "cudnn": 19}
    assert np.mean(np.abs(errors["flash2"])) < 0.08
    assert np.mean(np.abs(errors["cudnn"])) < 0.08
    assert max(abs(e) for own in errors.values() for e in own) < 0.22


def test_one_query_has_the_tile_of_a_split_also_where_keys_are_whole() -> None:
    flow = load_kernel("cudnn").dataflow()
    one, many = (choose(flow, Attention(n_q=n, n_k=4096, d=64, batch=32, heads=16), H200, {})[0] for n in (1, 64))
    assert (one.block_q, one.groups, one.splits) == (64, 1, 1)
    assert (many.block_q, many.groups, many.splits) == (128, 2, 1)
