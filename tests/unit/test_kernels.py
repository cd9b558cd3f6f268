"""Kernels that people run: their files, their schedules, and a few of their measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from iosim import Attention, compare
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.kernels import kernel_names, load_kernel
from iosim.memory.triton import registers, serial_cycles
from iosim.study.choose import choose
from iosim.study.validate import shipped_rows
from iosim.study.validate.rows import Row
from iosim.study.validate.times import predicted_time

H200 = load_hardware("h200-sxm")


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_computes_what_its_dataflow_does(name: str) -> None:
    machine = "mp31" if name == "mp31" else "h200-sxm"
    done = compare(
        Attention(n_q=300, d=64, heads=2, causal=True), dataflows=load_kernel(name).dataflow(), hardware=machine
    )
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
        (head + "[settings]\ncycles = 3\n[[tile]]\nblock_q = 64\nblock_k = 64\n", "cycles: 3 is not a table"),
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
