"""What a block occupies: SRAM by item, registers, and the limit that binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.dataflows.flash1 import flash1
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.dataflows.standard_backward import standard_backward
from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware, profile_names
from iosim.memory.onchip import Footprint, footprints, placement, resident_blocks
from iosim.problem import Attention
from iosim.schedule import Order, Role, Schedule, Step

KIB = 1024
MP31, H200 = load_hardware("mp31"), load_hardware("h200-sxm")


def block(block_q: int, block_k: int, hardware: Hardware = MP31, d: int = 128, **fields: object) -> Footprint:
    s = Schedule(**{"block_q": block_q, "block_k": block_k, "groups": max(1, block_q // 64), **fields})  # type: ignore[arg-type]
    return footprints(flash2(Attention(n_q=4096, d=d), s), s, hardware)["attention"]


def in_kib(items: Mapping[str, int]) -> dict[str, float]:
    return {name: size / KIB for name, size in items.items()}


# ---------------------------------------------------------------- SRAM


def test_256x64_on_mp31_takes_160_kib() -> None:
    """fp16, d = 128: Q 256 x 128, two buffers of K and of V 64 x 128, and P 256 x 64, which SQMMA reads from SRAM."""
    f = block(256, 64)
    assert in_kib(f.items) == {"q": 64, "k x2": 32, "v x2": 32, "p": 32}
    assert (f.sram_bytes, f.sram_capacity) == (160 * KIB, 192 * KIB)


@pytest.mark.parametrize(
    ("stages", "kib"),
    [((1,), 64 + 32 + 32 + 64), ((2, 1), 64 + 2 * 32 + 32 + 64), ((2,), 64 + 2 * 32 + 2 * 32 + 64)],
)
def test_readings_of_256x128(stages: tuple[int, ...], kib: int) -> None:
    """The guide's largest tile fills the 192 KiB with P and one buffer of K and V; two do not fit."""
    f = block(256, 128, stages=stages)
    assert f.sram_bytes == kib * KIB
    assert f.fits == (kib <= 192)


def test_p_stays_in_registers_where_the_matrix_unit_reads_them() -> None:
    assert in_kib(block(128, 128, H200).items) == {"q": 32, "k x2": 64, "v x2": 64}


def test_an_operand_that_must_be_staged_cannot_be_put_into_registers() -> None:
    with pytest.raises(InputError, match="tile p cannot stay in registers on mp31: SQMMA reads operands from sram"):
        block(64, 64, place={"p": "registers"})


def test_a_tile_may_be_put_into_sram() -> None:
    assert block(128, 128, H200, place={"p": "sram"}).items["p"] == 32 * KIB


def test_a_tile_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"place: the program has no tile 'pp' \(it has k, l, m, .*\)"):
        block(64, 64, place={"pp": "sram"})


def test_accumulators_live_in_tensor_memory_where_there_is_one() -> None:
    s = Schedule(block_q=128, block_k=128)
    b200 = load_hardware("b200")
    places = placement(flash2(Attention(n_q=4096, d=128), s).kernels[0], s, b200)
    assert (places["x"], places["o"], places["q"], places["m"]) == ("tmem", "tmem", "sram", "registers")
    assert block(128, 128, b200, groups=1).tmem_bytes == 2 * 128 * 128 * 4  # P takes the room of the scores


def test_the_tiles_of_one_loop_at_a_time_are_in_sram() -> None:
    """The three passes of a long softmax reuse one buffer pair; what the products load comes once for each kernel."""
    s = Schedule(block_q=128, block_k=128, block_d=64, softmax_rows=4, softmax_cols=1024)
    prints = footprints(standard(Attention(n_q=4096, d=128), s), s, MP31)
    assert in_kib(prints["softmax"].items) == {"x1 x2": 16} or sum(prints["softmax"].items.values()) == 16 * KIB
    assert in_kib(prints["scores"].items) == {"q x2": 32, "k x2": 32}


def test_tiles_of_a_loop_stay_while_the_loops_inside_it_run() -> None:
    """flash1 with 64 x 256 and d = 64: K and V beside two buffers of Q and O 64 x 64 and of m and l."""
    s = Schedule(block_q=64, block_k=256, groups=2)
    f = footprints(flash1(Attention(n_q=4096, d=64), s), s, H200)["attention"]
    assert in_kib(f.items) == {"k": 32, "v": 32, "q x2": 16, "o x2": 16, "m x2": 0.5, "l x2": 0.5}


def test_registers_of_an_accumulator_are_held_through_all_loops_around_its_sums() -> None:
    """The products of a group of heads add up in 64 x 64 fp32: 32 registers of 128 threads, and the output."""
    a, s = Attention(n_q=256, d=64, heads=4, kv_heads=2), Schedule(block_q=64, block_k=64)
    f = footprints(standard_backward(a, s), s, H200)["dV"]
    assert f.registers == 32 + 32
    assert in_kib(f.items) == {"p x2": 16, "do x2": 16}


@given(st.sampled_from((16, 32, 64)), st.sampled_from((16, 32, 64)), st.sampled_from((8, 64)), st.integers(1, 4))
def test_more_buffers_take_more_room_and_never_more_blocks(bq: int, bk: int, d: int, stages: int) -> None:
    one, more = (block(bq, bk, d=d, stages=(n,)) for n in (stages, stages + 1))
    assert more.sram_bytes == one.sram_bytes + 2 * bk * d * 2
    assert more.resident <= one.resident


# ---------------------------------------------------------------- registers


def test_registers_of_a_thread_follow_from_the_tiles_that_are_alive() -> None:
    """128 x 128 with d = 128 in two groups, 256 threads: O and the scores take 64 registers each, P another 32 while
    both are alive; three statistics of a row half a register each, rounded; and 32 for addresses."""
    assert 32 + 64 + 64 <= block(128, 128, H200).registers <= 32 + 64 + 64 + 32 + 4


def test_two_buffers_of_p_take_registers_beside_the_scores() -> None:
    """P is 32 registers: one buffer takes the room of the scores, two are there while the next scores are made."""
    steps = tuple(Step("run", name) for name in ("k", "v", "qk", "softmax", "rescale", "pv"))
    order = Order((Role("groups", 2, steps),), {"k": 2, "v": 2, "p": 2})
    base = block(128, 128, H200)
    assert block(128, 128, H200, orders={"j": order}).registers == base.registers + 2 * 32


def test_a_producer_adds_threads_but_holds_no_tiles() -> None:
    producer = Role("producer", 1, (Step("issue", "k"), Step("issue", "v")))
    steps = tuple(Step("run", name) for name in ("qk", "softmax", "rescale", "pv"))
    order = Order((producer, Role("consumers", 2, steps)), {"k": 2, "v": 2})
    f = block(128, 128, H200, orders={"j": order})
    assert (f.threads, f.registers) == (384, block(128, 128, H200).registers)
    rounded = -(-f.registers * 32 // 256) * 256  # a warp's registers come in units
    assert f.block_registers == 8 * rounded + 128 * 32


# ---------------------------------------------------------------- resident blocks


@pytest.mark.parametrize(
    ("changes", "limit", "resident"),
    [
        ({}, "SRAM", 192 // 48),  # q 8 + k x2 16 + v x2 16 + p 8 KiB
        ({"sram.block_capacity_kib": 100, "sram.reserved_per_block_bytes": 17 * KIB}, "SRAM", 192 // (48 + 17)),
        ({"registers.registers_per_processor": 20000}, "registers", None),
        ({"processor.max_threads_per_block": 128, "processor.max_threads": 256}, "threads", 2),
        ({"processor.max_blocks": 1}, "blocks", 1),
    ],
)
def test_each_limit_binds_somewhere(changes: dict[str, float], limit: str, resident: int | None) -> None:
    hardware = MP31
    for name, value in changes.items():
        hardware = hardware.with_value(name, value)
    f = block(64, 64, hardware, d=64)
    assert f.limit == limit
    if resident is not None:
        assert f.resident == resident
    assert f.fits


def test_a_block_without_sram_has_a_limit_on_a_machine_that_knows_none() -> None:
    machine = replace(MP31, registers=None, max_threads=None, max_blocks=None)
    assert resident_blocks(machine, 0, 0, 1000, 256) == (4, "threads")  # as many threads as one block may have


def test_tensor_memory_binds_on_b200() -> None:
    b200 = load_hardware("b200").with_value("tmem.capacity_kib", 64).with_value("processor.max_blocks", 32)
    assert block(64, 64, b200, d=64).limit == "tensor memory"


# ---------------------------------------------------------------- what does not fit


def test_too_much_sram_is_complained_about_item_by_item() -> None:
    f = block(256, 256)
    assert not f.fits
    assert f.complaint(MP31) == (
        "kernel attention needs 458,752 B of SRAM (q 65,536 + k x2 131,072 + v x2 131,072 + p 131,072); "
        "mp31 gives a block 196,608 B"
    )


def test_too_many_registers_of_a_thread_are_complained_about() -> None:
    f = block(256, 64, groups=1)
    assert not f.fits
    assert f.complaint(MP31).startswith("kernel attention keeps about ")
    assert f.complaint(MP31).endswith("registers a thread in its tiles (128 threads); mp31 has 255 a thread")


def test_a_register_file_that_is_too_small_for_all_threads_is_complained_about() -> None:
    small = MP31.with_value("registers.registers_per_processor", 40000)
    f = block(256, 64, small)
    assert f.resident == 0
    assert f.limit == "registers"
    assert f.registers <= 255
    total = f.registers * 512
    assert f.complaint(small) == (
        f"kernel attention needs about {total:,} registers (up to {f.registers} for each of 512 threads); "
        "a MP of mp31 has 40,000"
    )


def test_too_many_threads_are_complained_about() -> None:
    small = MP31.with_value("processor.max_threads_per_block", 256)
    assert block(256, 32, small).complaint(small) == "kernel attention needs 512 threads; mp31 gives a block 256"


def test_too_much_tensor_memory_is_complained_about() -> None:
    b200 = load_hardware("b200").with_value("tmem.capacity_kib", 32)
    f = block(128, 64, b200, groups=1)
    assert not f.fits
    assert "B of tensor memory; b200 has 32,768 B" in f.complaint(b200)


@pytest.mark.parametrize("name", profile_names())
def test_what_fits_has_a_block_and_what_does_not_a_complaint(name: str) -> None:
    hardware = load_hardware(name)
    for bq, bk, d in ((16, 16, 8), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512)):
        f = block(bq, bk, hardware, d=d, groups=min(8, max(1, bq // 64)))
        assert f.fits == (f.resident > 0 and f.registers <= (f.max_registers or f.registers))
        if not f.fits:
            assert hardware.name in replace(f).complaint(hardware)


# ---------------------------------------------------------------- what is kept


def test_what_is_kept_of_a_block_is_of_its_kernel_schedule_and_machine() -> None:
    """Nothing that was found for one machine or schedule answers for another.

    Q 16 KiB, K and V 16 KiB a buffer, P 8 KiB where it is staged: 88 of 192 KiB, 88 of 100, 56 of 192, and 80 with the
    1 KiB that is reserved of 228.
    """
    s = Schedule(block_q=64, block_k=64)
    program = flash2(Attention(n_q=4096, d=128), s)
    small = replace(MP31, sram=replace(MP31.sram, capacity_bytes=100 * KIB, block_capacity_bytes=100 * KIB))
    asked = [(s, MP31), (s, small), (replace(s, stages=(1,)), MP31), (replace(s, place={"p": "registers"}), H200)]
    first = [footprints(program, *of)["attention"] for of in asked]
    assert [f.resident for f in first] == [2, 1, 3, 2]
    assert [footprints(program, *of)["attention"] for of in reversed(asked)] == first[::-1]
