"""Profiles: what ships, what the numbers become, and what a bad file is told."""

import dataclasses
import hashlib
import json
import math
import pickle
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from iosim import hardware
from iosim.errors import InputError
from iosim.hardware import DEFAULT, Hardware, load_hardware, profile_names

PROFILES = Path(__file__).parents[2] / "hw_profiles"
NAMES = ["a100-sxm-80gb", "b200", "h100-sxm", "h200-calibrated", "h200-sxm", "mi300x", "mp22", "mp31", "mp31-liquid"]
KIB, MIB, GIB = 2**10, 2**20, 2**30

Edit = Callable[[str, str], Path]


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """Write a copy of the mp31 profile in which one text is replaced; return its path."""

    def write(old: str, new: str) -> Path:
        text = (PROFILES / "mp31.toml").read_text("utf-8")
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in mp31.toml"
        path = tmp_path / "my.toml"
        path.write_text(text.replace(old, new), "utf-8")
        return path

    return write


def refusal(path: object) -> str:
    """The message that loading raises, without the file's name, which it must begin with."""
    with pytest.raises(InputError) as caught:
        load_hardware(path)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# ---------------------------------------------------------------- what ships


def test_names_of_the_shipped_profiles() -> None:
    assert profile_names() == NAMES
    assert DEFAULT in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_profile_loads_under_its_own_name(name: str) -> None:
    machine = load_hardware(name)
    assert machine.name == name
    assert machine == load_hardware(PROFILES / f"{name}.toml") == load_hardware(str(PROFILES / f"{name}.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_every_estimate_a_range(name: str) -> None:
    for fact in load_hardware(name).fields():
        assert len(fact.source) > 1, fact.name
        if fact.confidence == "estimate":
            assert fact.low is not None
            assert fact.high is not None
        if fact.confidence == "unknown":
            assert fact.value is None


@pytest.mark.parametrize("name", NAMES)
def test_every_source_that_is_spelt_out_is_used(name: str) -> None:
    machine = load_hardware(name)
    cited = machine.notes + " ".join(fact.source for fact in machine.fields())
    assert [short for short, _ in machine.sources if short not in cited] == []


def test_time_can_be_predicted_on_every_machine_but_mp22() -> None:
    missing = {name: load_hardware(name).missing_for_time() for name in NAMES}
    assert {name for name, fields in missing.items() if fields} == {"mp22"}
    assert missing["mp22"] == [
        "processor.count",
        "processor.clock_mhz",
        "processor.max_threads",
        "processor.max_blocks",
        "hbm.latency_cycles",
        "l2.capacity_mib",
        "l2.partitions",
        "l2.bandwidth_gb_per_s",
        "l2.latency_cycles",
        "sram.bandwidth_bytes_per_clock",
        "sram.latency_cycles",
        "registers.registers_per_processor",
        "registers.max_registers_per_thread",
        "copy.bandwidth_bytes_per_clock",
        "exp.ops_per_clock",
        "vector.lanes_per_clock",
    ]


# ---------------------------------------------------------------- golden values, each with its derivation


def test_mp31_in_si_units() -> None:
    m = load_hardware("mp31")
    assert (m.processors, m.clock_hz, m.called) == (56, 2_000_000_000, "MP")
    assert (m.warp_size, m.group_threads, m.max_threads, m.max_threads_per_block) == (32, 128, 3072, 1024)
    assert (m.max_blocks, m.registers, m.max_registers_per_thread) == (32, 131072, 255)
    assert m.hbm.kind == "GDDR6"
    assert m.hbm.capacity_bytes == math.floor(7991 * GIB / 100)  # 79.91 GiB
    assert (m.hbm.bandwidth, m.hbm.read_efficiency, m.hbm.mixed_efficiency) == (1_600_000_000_000, 0.85, 0.75)
    assert m.hbm.latency_ps == 350_000  # 700 cycles at 0.5 ns
    assert m.l2 is not None
    assert (m.l2.capacity_bytes, m.l2.bandwidth, m.l2.latency_ps) == (62914560, 4 * 10**12, 130_000)
    assert m.sram.capacity_bytes == m.sram.block_capacity_bytes == 192 * KIB
    assert m.sram.reserved_per_block_bytes == 0
    assert m.sram.bandwidth == 256_000_000_000  # 128 B x 2 GHz
    assert (m.copy.name, m.copy.asynchronous, m.copy.bandwidth) == ("TME", True, 240_000_000_000)
    assert m.staged_operand
    assert m.matrix_rate("fp16") == 460 * 10**12 // 56
    assert (m.exp_rate, m.vector_rate, m.launch_ps) == (64 * 10**9, 256 * 10**9, 4_000_000)
    assert m.energy.tdp_w is None
    assert m.energy.hbm_pj_per_byte == 56


def test_mp31_liquid_differs_in_clock_and_rates_only() -> None:
    air, liquid = load_hardware("mp31"), load_hardware("mp31-liquid")
    assert liquid.clock_hz == 2_180_000_000
    assert liquid.matrix_rate("fp8_e4m3") == 1_001_400_000_000_000 // 56
    assert (liquid.sram.capacity_bytes, liquid.hbm) == (
        air.sram.capacity_bytes,
        dataclasses.replace(air.hbm, latency_ps=math.ceil(700 * 10**6 / 2180)),
    )


@pytest.mark.parametrize(
    ("name", "flop_per_clock"),
    # 16-bit FLOP a clock and processor, from the vendors' architecture papers, not from the profile's totals
    [
        ("a100-sxm-80gb", 2048),
        ("h100-sxm", 4096),
        ("h200-sxm", 4096),
        ("b200", 8192),
        ("mi300x", 2048),
        ("mp31", 4096),
        ("mp31-liquid", 4096),
    ],
)
def test_clock_and_total_agree_with_the_width_of_the_matrix_unit(name: str, flop_per_clock: int) -> None:
    machine = load_hardware(name)
    rate, clock = machine.matrix_rate("fp16"), machine.clock_hz
    assert rate is not None
    assert clock is not None
    assert rate / clock == pytest.approx(flop_per_clock, rel=0.004)
    assert machine.matrix_rate("bf16") == rate


@pytest.mark.parametrize(
    ("name", "fp32_tflops", "clock"),
    # FP32 vector peak and the clock at which the vendor quotes it; one FMA is one lane operation and 2 FLOP
    [
        ("a100-sxm-80gb", 19.5, 1.41e9),
        ("h100-sxm", 66.9, 1.98e9),
        ("h200-sxm", 66.9, 1.98e9),
        ("b200", 74.4, 1.965e9),
        ("mi300x", 163.4, 2.1e9),
    ],
)
def test_vector_lanes_give_the_fp32_peak(name: str, fp32_tflops: float, clock: float) -> None:
    m = load_hardware(name)
    assert m.vector_rate is not None
    assert m.clock_hz is not None
    assert m.processors is not None
    lanes = m.vector_rate / m.clock_hz
    assert 2 * lanes * clock * m.processors == pytest.approx(fp32_tflops * 1e12, rel=0.01)


def test_a100() -> None:
    m = load_hardware("a100-sxm-80gb")
    assert (m.processors, m.hbm.bandwidth, m.registers) == (108, 2_039 * 10**9, 65536)
    # 164 KiB an SM = 163 KiB for a block and 1 KiB reserved
    assert m.sram.capacity_bytes == m.sram.block_capacity_bytes + m.sram.reserved_per_block_bytes == 164 * KIB
    assert (m.matrix.operand_a, m.matrix.instruction_m, m.matrix.issued_by) == ("registers", 16, "warp")
    assert m.matrix_rate("fp8_e4m3") is None
    assert m.l2 is not None
    assert m.l2.capacity_bytes == 2 * 20971520  # two partitions
    assert m.copy.asynchronous


H200 = load_hardware("h200-sxm")


def test_h100_exp_rate_is_the_papers_3_9_tera() -> None:
    m = load_hardware("h100-sxm")
    assert m.exp_rate is not None
    assert m.exp_rate * 132 == pytest.approx(3.9e12, rel=0.01)
    assert (m.matrix.operand_a, m.matrix.operand_b, m.matrix.instruction_m) == ("either", "sram", 64)
    assert not m.staged_operand


def test_h200_uses_this_projects_measurements() -> None:
    m = load_hardware("h200-sxm")
    assert m.hbm.capacity_bytes == 150109880320  # h200_device.json
    assert m.hbm.bandwidth * m.hbm.read_efficiency == pytest.approx(4.644e12, rel=1e-3)
    assert m.hbm.bandwidth * m.hbm.mixed_efficiency == pytest.approx(4.248e12, rel=1e-3)
    assert m.l2 is not None
    assert (m.l2.capacity_bytes, m.launch_ps) == (62914560, 1_300_000)
    assert (m.sram.capacity_bytes, m.sram.block_capacity_bytes) == (233472, 232448)
    assert m.copy.bandwidth == 181_170_000_000  # 99 B x 1.83 GHz
    assert m.with_units(["cp.async"]).copy.bandwidth == 221_430_000_000  # 121 B x 1.83 GHz
    assert m.sram.latency_ps == math.ceil(23e6 / 1830)


def test_b200_keeps_accumulators_in_tensor_memory() -> None:
    m = load_hardware("b200")
    assert (m.matrix.accumulator, m.matrix.operand_a) == ("tmem", "sram_or_tmem")
    assert m.tmem is not None
    assert m.tmem.capacity_bytes == 128 * 512 * 4  # lanes, columns, bytes
    assert not m.staged_operand
    assert (m.processors, m.hbm.capacity_bytes, m.hbm.bandwidth) == (148, 180 * 10**9, 8 * 10**12)


def test_mi300x_has_a_cache_behind_its_private_l2s() -> None:
    m = load_hardware("mi300x")
    assert [cache.name for cache in m.caches] == ["l3", "l2"]
    assert m.l2 is m.caches[-1]
    assert (m.l2.capacity_bytes, m.l2.partitions, m.l2.private_partitions) == (8 * 4 * MIB, 8, True)
    assert (m.warp_size, m.group_threads) == (64, 256)
    assert (m.registers, m.max_registers_per_thread) == (512 * KIB // 4, 512)
    assert (m.matrix.operand_a, m.matrix.operand_b) == ("registers", "registers")
    assert not m.copy.asynchronous


def test_mp22_knows_capacity_but_no_rate() -> None:
    m = load_hardware("mp22")
    assert (m.sram.capacity_bytes, m.hbm.capacity_bytes, m.hbm.bandwidth) == (64 * KIB, 48 * GIB, 768 * 10**9)
    assert (m.processors, m.clock_hz, m.vector_rate, m.exp_rate) == (None, None, None, None)
    assert m.matrix_rate("fp16") is None
    assert m.l2 is not None
    assert m.l2.capacity_bytes is None
    assert (m.warp_size, m.group_threads) == (128, 128)


@pytest.mark.parametrize("name", NAMES)
def test_fp32_never_runs_as_tf32(name: str) -> None:
    assert load_hardware(name).matrix_rate("fp32") is None


def test_a_rate_of_an_unheard_dtype_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        load_hardware("mp31").matrix_rate("fp61")
    assert str(caught.value) == ("dtype 'fp61': must be one of fp16, bf16, fp32, tf32, fp8_e4m3 (did you mean 'fp16'?)")


# ---------------------------------------------------------------- the object


def test_a_machine_is_frozen_hashable_and_survives_pickle() -> None:
    machine = load_hardware("mp31")
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.processors = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.sram.capacity_bytes = 1  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(machine))  # noqa: S301
    assert copy == machine
    assert len({copy, machine}) == 1
    assert copy.fields() == machine.fields()


def test_hash_is_of_the_content_not_of_the_layout(edit: Edit) -> None:
    machine = load_hardware("mp31")
    data = tomllib.loads((PROFILES / "mp31.toml").read_text("utf-8"))
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    assert machine.profile_hash == hashlib.sha256(canonical).hexdigest()
    assert load_hardware(edit("[copy]", "# the copy engine\n\n[ copy ]")).profile_hash == machine.profile_hash
    assert load_hardware(edit("value = 1600", "value = 1601")).profile_hash != machine.profile_hash


def test_fields_carry_unit_source_and_range() -> None:
    facts = {fact.name: fact for fact in load_hardware("mp31").fields()}
    bandwidth = facts["l2.bandwidth_gb_per_s"]
    assert (bandwidth.value, bandwidth.unit, bandwidth.confidence) == (4000, "GB/s", "estimate")
    assert (bandwidth.low, bandwidth.high) == (3000, 5500)
    assert "A100 and H100" in bandwidth.source
    assert facts["energy.tdp_w"] == ("energy.tdp_w", None, "W", "unknown", "TDP is not public", None, None)
    units = {name: fact.unit for name, fact in facts.items()}
    assert units["hbm.capacity_gib"] == "GiB"
    assert units["sram.reserved_per_block_bytes"] == "B"
    assert units["copy.bandwidth_bytes_per_clock"] == "B/clock"
    assert units["matrix.tflops.fp16"] == "TFLOPS"
    assert units["exp.ops_per_clock"] == "/clock"
    assert units["launch.kernel_us"] == "us"
    assert units["energy.hbm_pj_per_byte"] == "pJ/B"
    assert units["processor.count"] == units["hbm.read_efficiency"] == ""


def test_estimates_are_the_guesses_with_their_ranges() -> None:
    machine = load_hardware("mp31")
    guesses = {e.name: e for e in machine.estimates()}
    assert guesses.keys() == {f.name for f in machine.fields() if f.confidence == "estimate"}
    assert guesses["exp.ops_per_clock"][1:4] == (32, 16, 32)
    assert "processor.count" not in guesses


def test_durations_are_rounded_up_once() -> None:
    machine = load_hardware("mp31").with_value("processor.clock_mhz", 1999)
    assert machine.sram.latency_ps == 15008  # 30 cycles / 1999 MHz = 15007.5 ps
    # 1.1 us is exactly 1,100,000 ps although the float 1.1 lies a little above
    assert machine.with_value("launch.kernel_us", 1.1).launch_ps == 1_100_000


# ---------------------------------------------------------------- with_value


def test_with_value_returns_a_new_machine() -> None:
    machine = load_hardware("mp31")
    faster = machine.with_value("hbm.bandwidth_gb_per_s", 3200)
    assert (machine.hbm.bandwidth, faster.hbm.bandwidth) == (1_600 * 10**9, 3_200 * 10**9)
    assert faster.profile_hash != machine.profile_hash
    assert faster.hbm.capacity_bytes == machine.hbm.capacity_bytes
    fact = next(f for f in faster.fields() if f.name == "hbm.bandwidth_gb_per_s")
    assert fact[1:] == (3200, "GB/s", "estimate", "assumed in place of 1600", 3200, 3200)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("processor.count", 64, lambda m: m.processors == 64),
        ("processor.clock_mhz", 1500, lambda m: m.sram.bandwidth == 192 * 10**9),
        ("sram.block_capacity_kib", 64, lambda m: m.sram.block_capacity_bytes == 64 * KIB),
        ("registers.registers_per_processor", 65536, lambda m: m.registers == 65536),
        ("l2.capacity_mib", 30, lambda m: m.l2.capacity_bytes == 30 * MIB),
        ("matrix.tflops.fp16", 560, lambda m: m.matrix_rate("fp16") == 10**13),
        ("matrix.operand_a", "either", lambda m: not m.staged_operand),
        ("copy.asynchronous", False, lambda m: not m.copy.asynchronous),
        ("launch.kernel_us", 0, lambda m: m.launch_ps == 0),
        ("title", "mine", lambda m: m.title == "mine"),
        ("processor.count", None, lambda m: m.missing_for_time() == ["processor.count"]),
    ],
)
def test_with_value_reaches_every_kind_of_field(
    name: str, value: float | str | bool | None, read: Callable[[Hardware], bool]
) -> None:
    assert not read(load_hardware("mp31"))
    assert read(load_hardware("mp31").with_value(name, value))


def test_with_value_adds_a_rate_that_the_machine_lacks() -> None:
    machine = load_hardware("a100-sxm-80gb").with_value("matrix.tflops.fp8_e4m3", 108)
    assert machine.matrix_rate("fp8_e4m3") == 10**12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "hbm.bandwith_gb_per_s",
            1,
            "profile mp31: hbm.bandwith_gb_per_s: unknown field (did you mean 'hbm.bandwidth_gb_per_s'?)",
        ),
        ("tmem.capacity_kib", 256, "profile mp31: tmem.capacity_kib: this machine has no such level"),
        (
            "processor.count",
            0,
            "profile mp31: processor.count: value = 0 must be a whole number from 1 to 1000000",
        ),
        (
            "processor.count",
            1.5,
            "profile mp31: processor.count: value = 1.5 must be a whole number from 1 to 1000000",
        ),
        ("exp.ops_per_clock", math.nan, "profile mp31: exp.ops_per_clock: value = nan is not finite"),
        ("exp.ops_per_clock", "16", "profile mp31: exp.ops_per_clock: value = '16' is not a number"),
        ("exp.ops_per_clock", True, "profile mp31: exp.ops_per_clock: value = True is not a number"),
        (
            "warp.size",
            32,
            "profile mp31: warp.size: unknown field",
        ),
        (
            "sram.capacity_kib",
            None,
            "profile mp31: sram.capacity_kib: must be known: a number from 0.001 to 1000000000",
        ),
        (
            "sram.capacity_kib",
            100,
            "profile mp31: sram.block_capacity_kib: value = 192 with 0 reserved bytes "
            "must be at most sram.capacity_kib = 100",
        ),
        ("notes", " ", "profile mp31: notes: ' ' must be a text that is not empty"),
        ("copy.asynchronous", "yes", "profile mp31: copy.asynchronous: 'yes' must be true or false"),
    ],
)
def test_with_value_refuses_what_a_file_may_not_say(name: str, value: float | str | bool | None, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_hardware("mp31").with_value(name, value)
    assert str(caught.value) == message


# ---------------------------------------------------------------- bad files

COUNT = 'count = { value = 56, source = "MUSA-INST'
LIKE_COUNT = "count = {{ {} }} # "
QUANTITY = 'give { value = ..., source = "...", confidence = "..." } or { unknown = "why" }'
MEASURED = ', source = "x", confidence = "measured"'
ESTIMATE = ', source = "x", confidence = "estimate"'
WHOLE = "must be a whole number from 1 to 1000000"
CONFIDENCE = "must be one of datasheet, measured, inferred, estimate (did you mean 'measured'?)"
BOTH = "an estimate needs both, and so does any range"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("value = -1" + MEASURED, f"value = -1 {WHOLE}"),
        ("value = 0" + MEASURED, f"value = 0 {WHOLE}"),
        ("value = 2.5" + MEASURED, f"value = 2.5 {WHOLE}"),
        ("value = 9e99" + MEASURED, f"value = 9e+99 {WHOLE}"),
        ("value = nan" + MEASURED, "value = nan is not finite"),
        ("value = inf" + MEASURED, "value = inf is not finite"),
        ('value = "56"' + MEASURED, "value = '56' is not a number"),
        ("value = true" + MEASURED, "value = True is not a number"),
        ("value = [56]" + MEASURED, "value = [56] is not a number"),
        ('value = 56, confidence = "measured"', "{'value': 56, 'confidence': 'measured'} has no source"),
        ('value = 56, source = "x"', "{'value': 56, 'source': 'x'} has no confidence"),
        ('source = "x", confidence = "measured"', "{'source': 'x', 'confidence': 'measured'} has no value"),
        (
            'value = 56, source = " ", confidence = "measured"',
            "source = ' ' must be a text that is not empty",
        ),
        (
            'value = 56, source = "x", confidence = "mesured"',
            f"confidence = 'mesured' {CONFIDENCE}",
        ),
        (
            'value = 56, source = "x", confidence = ["measured"]',
            f"confidence = ['measured'] {CONFIDENCE}",
        ),
        (
            "value = 56" + ESTIMATE,
            f"value = 56 has no low and high; {BOTH}",
        ),
        (
            "value = 56, low = 40" + MEASURED,
            f"value = 56 has no high; {BOTH}",
        ),
        (
            "value = 56, low = 60, high = 70" + ESTIMATE,
            "value = 56 must lie between low = 60 and high = 70",
        ),
        (
            "value = 56, low = 40, high = 50" + ESTIMATE,
            "value = 56 must lie between low = 40 and high = 50",
        ),
        (
            "value = 56, low = 0, high = 70" + ESTIMATE,
            f"low = 0 {WHOLE}",
        ),
        ("value = 56, low = nan, high = 70" + ESTIMATE, "low = nan is not finite"),
        (
            'value = 56, source = "x", confidense = "measured"',
            "unknown key 'confidense' (did you mean 'confidence'?); "
            "allowed: value, low, high, source, confidence, unknown",
        ),
        ('unknown = "why", value = 56', "unknown excludes every other key"),
        ('unknown = ""', "unknown = '' must be a text that is not empty"),
        ("", "{} has no value"),
    ],
)
def test_a_bad_number_is_named_with_what_is_allowed(edit: Edit, number: str, message: str) -> None:
    path = edit(COUNT, LIKE_COUNT.format(number) + COUNT)
    assert refusal(path) == f"processor.count: {message}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            COUNT,
            "count = 56 # ",
            'processor.count: 56 must be a table { value = ..., source = "...", confidence = "..." }',
        ),
        (COUNT, "# ", f"processor.count: missing; {QUANTITY}"),
        (
            "warp_size =",
            "wrap_size =",
            "processor.wrap_size: unknown key (did you mean 'warp_size'?); allowed: called, count, "
            "clock_mhz, warp_size, warps_per_group, max_threads, max_threads_per_block, max_blocks, "
            "boost_clock_mhz, matrix_clock_mhz, barrier_cycles, barrier_cycles_per_warp, reduce_cycles, turn_cycles, "
            "arrival_cycles",
        ),
        (
            "bandwidth_gb_per_s = { value = 1600",
            "bandwidth_gib_per_s = { value = 1600",
            "hbm.bandwidth_gib_per_s: unknown key (did you mean 'bandwidth_gb_per_s'?); allowed: name, "
            "kind, capacity_gb, capacity_gib, bandwidth_gb_per_s, read_efficiency, mixed_efficiency, "
            "latency_cycles, access_bytes, broken_pieces, broken_among_pieces",
        ),
        (
            "capacity_gib =",
            'capacity_gb = { value = 80, source = "x", confidence = "measured" }\ncapacity_gib =',
            "hbm: must have one of capacity_gb and capacity_gib",
        ),
        (
            "read_efficiency = { value = 0.85, low = 0.75, high = 0.92",
            "read_efficiency = { value = 85, low = 75, high = 92",
            "hbm.read_efficiency: value = 85 must be a number from 0.001 to 1",
        ),
        ('kind = "GDDR6"', "kind = 6", "hbm.kind: 6 must be one line of at most 200 characters"),
        ('kind = "GDDR6"', 'kind = "a\\nb"', "hbm.kind: 'a\\nb' must be one line of at most 200 characters"),
        ('title = "Moore', 'title = "" # "Moore', "title: '' must be one line of at most 200 characters"),
        ("asynchronous = true", 'asynchronous = "true"', "copy.asynchronous: 'true' must be true or false"),
        ("asynchronous = true", "", "copy.asynchronous: missing"),
        (
            'operand_a = "sram"',
            'operand_a = "register"',
            "matrix.operand_a: 'register' must be one of sram, registers, either, sram_or_tmem "
            "(did you mean 'registers'?)",
        ),
        (
            'operand_a = "sram"',
            'operand_a = "sram_or_tmem"',
            'matrix: names tmem, but [[memory]] lists no level with name = "tmem"',
        ),
        (
            "[exp]",
            "[exq]",
            "exq: unknown key (did you mean 'exp'?); allowed: schema, name, title, vendor, "
            "notes, processor, memory, copy, copy_threads, matrix, matrix_warp, exp, vector, launch, power, "
            "energy, sources",
        ),
        ('name = "l2"', 'name = "hbm"', "memory: level 'hbm' is given twice"),
        (
            'name = "sram"',
            'name = "srm"',
            "memory: name = 'srm' of level 3 must be one of hbm, l3, l2, sram, tmem, registers (did you mean 'sram'?)",
        ),
        (
            'name = "l2"',
            "",
            "memory: name = None of level 2 must be one of hbm, l3, l2, sram, tmem, registers",
        ),
        (
            'schema = "iosim.hardware/1"',
            'schema = "iosim.hardware/2"',
            "schema: 'iosim.hardware/2' must be one of iosim.hardware/1 (did you mean 'iosim.hardware/1'?)",
        ),
        ('schema = "iosim.hardware/1"', "", "schema: missing"),
        ('name = "mp31"', 'name = "MP 31"', "name: 'MP 31' must be at most 64 of a-z, 0-9, '.', '_' and '-'"),
        (
            'name = "mp31"',
            "name = 2026-11-30",
            "name: datetime.date(2026, 11, 30) must be one line of at most 200 characters",
        ),
        (
            "max_threads = { value = 3072",
            "max_threads = { value = 512",
            "processor.max_threads_per_block: value = 1024 must be at most max_threads = 512",
        ),
        (
            "warps_per_group = { value = 4",
            "warps_per_group = { value = 64",
            "processor.warps_per_group: a group of 2048 threads must be at most max_threads_per_block = 1024",
        ),
        (
            "block_capacity_kib = { value = 192",
            "block_capacity_kib = { value = 193",
            "sram.block_capacity_kib: value = 193 with 0 reserved bytes must be at most sram.capacity_kib = 192",
        ),
        (
            "reserved_per_block_bytes = { value = 0",
            "reserved_per_block_bytes = { value = 1",
            "sram.block_capacity_kib: value = 192 with 1 reserved bytes must be at most sram.capacity_kib = 192",
        ),
    ],
)
def test_a_bad_field_is_named(edit: Edit, old: str, new: str, message: str) -> None:
    assert refusal(edit(old, new)) == message


def without(*headers: str) -> str:
    """The mp31 profile with the tables that hold one of these texts left out."""
    text = (PROFILES / "mp31.toml").read_text("utf-8")
    kept = [table for table in text.split("\n\n") if not any(header in table for header in headers)]
    return "\n\n".join(kept)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (('name = "hbm"',), 'hbm: missing; [[memory]] must list a level with name = "hbm"'),
        (('name = "sram"',), 'sram: missing; [[memory]] must list a level with name = "sram"'),
        (("[[memory]]",), 'memory: missing; [[memory]] must list a level with name = "hbm"'),
        (("[exp]",), "exp: missing; a profile needs the table [exp]"),
        (("[matrix.tflops]",), "matrix.tflops: missing; a profile needs the table [matrix.tflops]"),
        (
            ("[exp]", "[vector]", "[launch]", "[energy]"),
            "exp: missing; a profile needs the table [exp] (and 3 more: see iosim hw check)",
        ),
    ],
)
def test_a_table_that_lacks_is_named(tmp_path: Path, headers: tuple[str, ...], message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(without(*headers), "utf-8")
    assert refusal(path) == message


def test_a_machine_without_caches_is_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    path.write_text(without('name = "l2"'), "utf-8")
    machine = load_hardware(path)
    assert machine.l2 is None
    assert machine.caches == ()
    assert machine.missing_for_time() == []


def test_levels_out_of_order_are_refused(tmp_path: Path) -> None:
    text = (PROFILES / "mp31.toml").read_text("utf-8")
    tables = text.split("\n\n")
    hbm, l2 = (next(i for i, t in enumerate(tables) if f'name = "{name}"' in t) for name in ("hbm", "l2"))
    tables[hbm], tables[l2] = tables[l2], tables[hbm]
    path = tmp_path / "my.toml"
    path.write_text("\n\n".join(tables), "utf-8")
    assert refusal(path) == (
        "memory: levels go from far to near: hbm, l2, sram, registers, not l2, hbm, sram, registers"
    )


def test_memory_must_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("memory = 3\n", "utf-8")
    assert refusal(path) == "memory: must be a list of [[memory]] tables, not 3"
    path.write_text("memory = [3]\n", "utf-8")
    assert refusal(path).startswith("memory: name = None of level 1 must be one of hbm, ")


def test_an_empty_file_reports_the_first_lack_and_counts_the_others(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("", "utf-8")
    # schema, name, title, vendor, processor, memory, copy, matrix, exp, vector, launch, energy
    assert refusal(path) == "schema: missing (and 11 more: see iosim hw check)"


def test_a_key_given_twice_is_refused_with_its_line(edit: Edit) -> None:
    message = refusal(edit("asynchronous = true", "asynchronous = true\nasynchronous = false"))
    line = (PROFILES / "mp31.toml").read_text("utf-8").split("asynchronous")[0].count("\n") + 2
    assert message == (f"not valid TOML: this key is given twice (at line {line}, column 21): 'asynchronous = false'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"count = \n", "not valid TOML: Invalid value (at line 1, column 9): 'count ='"),
        (
            b"[copy]\n[copy]\n",
            "not valid TOML: Cannot declare ('copy',) twice (at line 2, column 6): '[copy]'",
        ),
        (
            b'{"name": "mp31"}',
            "not valid TOML: Invalid statement (at line 1, column 1): "
            """'{"name": "mp31"}'""",
        ),
        (b"a = " + b"[" * 100_000, "not valid TOML: nested too deeply"),
        (
            b"a = " + b"9" * 5000,
            "not valid TOML: Exceeds the limit (4300 digits) for integer string "
            "conversion: value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
        ),
        (b"name = '\xff'", "not UTF-8 at byte 8; a profile is a TOML file"),
        (b"\0\0\0\0", "not valid TOML: Invalid statement (at line 1, column 1): '\\x00\\x00\\x00\\x00'"),
        (b"#" * (2**20 + 1), "1048577 bytes; a profile has at most 1048576"),
    ],
    ids=["no value", "table twice", "JSON", "nested", "digits", "not UTF-8", "binary", "large"],
)
def test_a_file_that_is_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    assert refusal(path) == message


def test_a_number_too_large_to_print_is_still_named(edit: Edit) -> None:
    number = f'value = 0x{"f" * 9000}, source = "x", confidence = "measured"'
    path = edit(COUNT, LIKE_COUNT.format(number) + COUNT)
    assert refusal(path) == (
        "processor.count: value = a number of thousands of digits must be a whole number from 1 to 1000000"
    )


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.toml") == "cannot be read: No such file or directory"
    assert refusal(tmp_path) == "is a directory; a profile is a TOML file"
    assert refusal("/dev/null") == "is not a regular file; a profile is a TOML file"
    with pytest.raises(InputError, match=r"a\\x00\.toml: cannot be read: .*null byte"):
        load_hardware("a\0.toml")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "my.toml"
    path.write_text("", "utf-8")
    monkeypatch.setattr("builtins.open", deny)  # the tests may run as root, whom no mode keeps out
    assert refusal(path) == "cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mp32", " (did you mean 'mp31'?)"),
        ("H200-SXM", " (did you mean 'h200-sxm'?)"),
        ("zebra", ""),
        ("..", ""),
    ],
)
def test_an_unknown_machine_lists_and_suggests(name: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        load_hardware(name)
    assert str(caught.value) == (
        f"unknown machine {name!r}{hint}; shipped: {', '.join(NAMES)}; or give a path that ends in .toml"
    )


# ---------------------------------------------------------------- where profiles are found


def test_profiles_are_found_in_a_checkout_and_in_a_wheel(tmp_path: Path) -> None:
    package = Path(hardware.__file__).parent
    for layout, profiles in (("checkout", "hw_profiles"), ("wheel", "iosim/hw_profiles")):
        root = tmp_path / layout
        (root / "iosim").mkdir(parents=True)
        for module in ("hardware.py", "errors.py", "files.py", "same.py"):
            shutil.copy(package / module, root / "iosim")
        shutil.copytree(PROFILES, root / profiles)
        (root / "iosim" / "__init__.py").write_text("")
        code = "import iosim.hardware as m; print(m.__file__, m.load_hardware('mp31').name)"
        call = [sys.executable, "-c", code]
        done = subprocess.run(call, cwd=root, capture_output=True, text=True, check=False)
        assert (done.stdout.split(), done.stderr) == ([str(root / "iosim/hardware.py"), "mp31"], "")


def test_an_installation_without_profiles_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "__file__", str(tmp_path / "iosim" / "hardware.py"))
    with pytest.raises(InputError) as caught:
        profile_names()
    assert str(caught.value) == (f"no shipped profiles: neither {tmp_path / 'iosim'} nor {tmp_path} holds hw_profiles")


def test_hardware_imports_no_numpy() -> None:
    code = "import sys, iosim.hardware; print([m for m in ('numpy', 'pandas', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_units_are_chosen_by_name() -> None:
    warp = H200.with_units(["mma.sync", "cp.async"])
    assert (warp.matrix.issued_by, warp.copy.name) == ("warp", "cp.async")
    assert warp.matrix_rate("fp16") == pytest.approx(2 / 3 * (H200.matrix_rate("fp16") or 0), rel=1e-3)
    with pytest.raises(InputError, match=r"has no unit 'wgma' \(did you mean 'wgmma'\?\); it has 'wgmma', 'mma.sync'"):
        H200.with_units(["wgma"])


def test_at_another_clock_cycles_change_and_device_memory_does_not() -> None:
    half = H200.at_clock((H200.clock_hz or 0) // 2)
    assert (half.hbm, half.l2.bandwidth) == (H200.hbm, H200.l2.bandwidth) if half.l2 and H200.l2 else False
    assert half.sram.bandwidth == (H200.sram.bandwidth or 0) // 2
    assert half.matrix_rate("fp16") == (H200.matrix_rate("fp16") or 0) // 2
    assert half.sram.latency_ps == pytest.approx(2 * (H200.sram.latency_ps or 0), abs=1)
    assert half.at_clock(half.clock_hz or 0) is half
