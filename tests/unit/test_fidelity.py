"""How far `fair` is from `chip`.

Measured on 202 random machines (shipped ones with random rates, 2 to 12 processors) with one block at a time on a
processor, 16 trips or more, two stages or more: -2.0 to +2.3 %, three beyond 2 %; up to 4.3 % on h100-sxm as shipped.
Several blocks at a time: -1.6 to +4.6 % (76 cases), but up to 30 % where a partial wave falls on other processors.
One stage: -11.4 to +7.9 %.  1 to 15 trips: -7.1 to +3.6 %, the kernels of `standard` -18.2 to +20.5 %.  Causal: -8.1
to +16.1 %.  Loops in loops (flash1, `standard-backward` with grouped queries): up to 25.3 % (271 kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest

from iosim.dataflows.flash1 import flash1
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.dataflows.standard_backward import standard_backward
from iosim.hardware import Hardware, load_hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.timeline import Fidelity, KernelTime, timeline
from iosim.memory.cache import dram_flows
from iosim.memory.onchip import footprints
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule


@cache
def cut(name: str, processors: int) -> Hardware:
    """A shipped machine with fewer processors, and the memory and matrix rates that they have a share of."""
    hardware = load_hardware(name)
    scale = processors / (hardware.processors or 1)
    for fact in hardware.fields():
        if fact.value is not None and fact.name.endswith((".bandwidth_gb_per_s", "tflops.fp16", "tflops.bf16")):
            hardware = hardware.with_value(fact.name, fact.value * scale)
    return hardware.with_value("processor.count", processors)


def times(program: Program, s: Schedule, hardware: Hardware, fidelity: Fidelity) -> tuple[KernelTime, ...]:
    resident = {n: f.resident * (hardware.processors or 1) for n, f in footprints(program, s, hardware).items()}
    cache_bytes = hardware.l2.capacity_bytes if hardware.l2 is not None else None
    device = dram_flows(program, ledger(program), cache_bytes, resident)
    return timeline(program, s, hardware, device, fidelity=fidelity).kernels


def apart(program: Program, s: Schedule, hardware: Hardware) -> list[tuple[float, KernelTime]]:
    """By kernel, how far `chip` is from `fair` in percent of `chip`, and what `fair` says."""
    both = zip(times(program, s, hardware, "fair"), times(program, s, hardware, "chip"), strict=True)
    return [(abs(100 * (fair.makespan_ps / chip.makespan_ps - 1)), fair) for fair, chip in both]


class Tile(NamedTuple):
    block_q: int
    block_k: int
    groups: int
    d: int


MACHINES = ("mp31", "h200-sxm", "a100-sxm-80gb", "mp31-liquid", "h100-sxm")
TILES = (Tile(64, 128, 1, 128), Tile(128, 64, 2, 128), Tile(128, 128, 2, 128), Tile(192, 64, 3, 128))


def flash(
    name: str, processors: int, blocks: int, tile: Tile, stages: int, trips: int
) -> list[tuple[float, KernelTime]] | None:
    """As `apart`, None where several blocks share a processor at one time or none fits."""
    hardware = cut(name, processors)
    a = Attention(n_q=tile.block_q * blocks, n_k=tile.block_k * trips, d=tile.d)
    s = Schedule(block_q=tile.block_q, block_k=tile.block_k, groups=tile.groups, stages=(stages,))
    program = flash2(a, s)
    f = footprints(program, s, hardware)["attention"]
    if not f.fits or min(f.resident, -(-blocks // processors)) > 1:
        return None
    return apart(program, s, hardware)


# ---------------------------------------------------------------- alike blocks, one at a time on a processor


@pytest.mark.parametrize("blocks", [2, 4, 5, 9, 12])  # fewer than processors, one wave, partial last waves, three waves
@pytest.mark.parametrize("tile", TILES[:3])
@pytest.mark.parametrize("name", MACHINES[:3])
def test_alike_blocks_agree_within_two_percent(name: str, tile: Tile, blocks: int) -> None:
    found = flash(name, 4, blocks, tile, 2, 16)
    if found is None:
        pytest.skip("several blocks share a processor")
    ((percent, kernel),) = found
    assert percent <= 2
    assert kernel.spread_pct == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_alike_blocks_agree_over_a_grid(name: str) -> None:
    """All within what `fair` says, and within 2 % but for a few on h100-sxm: there the L2 is busy for two thirds of the
    time, so that how processors fall out of step decides how long two or three warp groups wait for 64 keys."""
    grid = product((3, 8), (0.6, 1, 1.2, 2, 3.4), TILES, (2, 3))
    found = []
    for processors, waves, tile, stages in grid:
        if (result := flash(name, processors, round(waves * processors), tile, stages, 20)) is not None:
            found.append(result[0][0])
    assert len(found) >= 40
    assert max(found) <= (5 if name == "h100-sxm" else 3)
    assert sum(percent > 2 for percent in found) <= (10 if name == "h100-sxm" else 4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), [("mp31", 1), ("mp31", 2), ("h200-sxm", 8)])
def test_whole_machines_agree_within_two_percent(name: str, heads: int) -> None:
    hardware = load_hardware(name)
    block_q = 64 if name == "mp31" else 128
    a = Attention(n_q=4096, d=128, heads=heads)
    s = Schedule(block_q=block_q, block_k=128, groups=block_q // 64)
    ((percent, _),) = apart(flash2(a, s), s, hardware)
    assert percent <= 2


# ---------------------------------------------------------------- elsewhere `fair` says how far it may be


def says(kernel: KernelTime) -> int:
    return kernel.spread_pct


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("n", [200, 700, 1100])
@pytest.mark.parametrize("name", MACHINES[:2])
def test_flash2_elsewhere_is_as_near_as_it_says(name: str, n: int, stages: int, causal: bool) -> None:
    a = Attention(n_q=n, d=64, heads=2, causal=causal)
    s = Schedule(block_q=64, block_k=64, stages=(stages,))
    for percent, kernel in apart(flash2(a, s), s, cut(name, 4)):
        assert percent <= says(kernel)


@pytest.mark.parametrize("name", MACHINES[:2])
def test_standard_is_as_near_as_it_says(name: str) -> None:
    a = Attention(n_q=600, d=64)
    s = Schedule(block_q=64, block_k=64, softmax_rows=8, softmax_cols=1024)
    for percent, kernel in apart(standard(a, s), s, cut(name, 4)):
        assert percent <= says(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("flow", [flash1, standard_backward])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("heads", [4, 10])
def test_loops_in_loops_are_as_near_as_it_says(flow: Callable[..., Program], heads: int, stages: int) -> None:
    a = Attention(n_q=64 * 16, n_k=64 * 3, d=128, heads=heads, kv_heads=heads // 2)
    s = Schedule(block_q=64, block_k=64, stages=(stages,), softmax_rows=8, softmax_cols=1024)
    for percent, kernel in apart(flow(a, s), s, cut("h200-sxm", 4)):
        assert percent <= says(kernel)


def test_several_blocks_at_a_time_are_as_near_as_it_says() -> None:
    for blocks in (5, 8, 11):
        a = Attention(n_q=64 * blocks, n_k=64 * 20, d=128)
        s = Schedule(block_q=64, block_k=64)
        ((percent, kernel),) = apart(flash2(a, s), s, cut("h200-sxm", 4))
        assert kernel.resident == 2
        assert says(kernel) == (30 if blocks == 11 else 10)
        assert percent <= says(kernel)
