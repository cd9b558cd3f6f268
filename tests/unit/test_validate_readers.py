"""Measurement files: every kind as it is, aliases, and one clear line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.study.validate import names, nsight, shipped_rows
from iosim.study.validate.readers import read
from iosim.study.validate.score import score

H200 = load_hardware("h200-sxm")
DATA = Path(__file__).parent.parent / "data"
CALLS = "impl,pass,dtype,batch,heads,n_q,n_k,d,causal,ms,peak_extra_bytes"
CALL = "flash2,fwd,float16,1,8,512,512,64,0,0.25,524288"
TILES = "batch,heads,n_q,d,block_m,block_n,stages,warps,ms,regs,spills,smem,note"
PUBLISHED = "source,device,kernel,pass,dtype,batch,heads,kv_heads,n_q,n_k,d,causal,metric,value,note"
KERNELS = "impl,pass,batch,heads,n,d,causal,kernel,us,dram_read_bytes"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "h200_mine.csv"


def test_shipped_files_are_read_whole() -> None:
    rows = shipped_rows()
    kinds = [r.kind for r in rows]
    assert {k: kinds.count(k) for k in ("calls", "kernels", "tiles", "published")} == {
        "calls": 181, "kernels": 111, "tiles": 152, "published": 183,
    }  # fmt: skip
    assert {r.machine for r in rows} == {"h200-sxm", "h100-sxm", "a100-sxm-80gb", "a100-sxm-40gb"}
    assert not [r for r in rows if r.kernel is not None and not r.kernel.role]
    refused = [r for r in rows if r.measured.get("launches") == 0]
    assert len(refused) == 22
    assert all("time" not in r.measured and r.measured["smem_bytes"] > 232448 for r in refused)


def test_a_call(file: Path) -> None:
    file.write_text(f"{CALLS}\n{CALL}\n")
    (row,) = read(file)
    assert row.problem == Attention(n_q=512, d=64, heads=8, causal_align="top-left")
    assert (row.implementation, row.direction, row.machine, row.line) == ("flash2", "forward", "h200-sxm", 2)
    assert row.measured == pytest.approx({"time": 0.25e-3, "peak_extra_bytes": 524288})


def test_other_names_of_the_same_things(file: Path) -> None:
    file.write_text(f"{CALLS}\n{CALL}\n")
    (plain,) = read(file)
    header = "KERNEL,direction,data_type,b,h,seqlen,n_k,head_dim,is_causal,time_us,peak_extra_bytes"
    file.write_text(f'{header.replace("time_us", "time_ms")}\nFA2,Forward,fp16,1,8,512,512,64,no,0.25,"524,288"\n')
    assert read(file) == (plain,)


def test_tiles_that_launch_that_do_not_and_that_fail(file: Path) -> None:
    refused = "does not launch: OutOfResources(278528, 232448, 'shared memory')"
    lines = ["4,16,4096,128,64,32,1,4,1.9,164,0,24576,", f'4,16,4096,128,256,256,2,4,,,,,"{refused}"',
             "4,16,4096,128,64,32,9,4,,,,,compiler error"]  # fmt: skip
    file.write_text("\n".join([TILES, *lines]) + "\n")
    ran, too_large, failed = read(file)
    assert ran.measured == pytest.approx({"launches": 1, "time": 1.9e-3, "smem_bytes": 24576, "registers": 164})
    assert too_large.measured == {"launches": 0, "smem_bytes": 278528}
    assert failed.measured == {}
    assert (ran.implementation, ran.direction) == ("triton", "forward")


def test_published_numbers_become_times_by_the_papers_convention(file: Path) -> None:
    """Causal backward: 4 * 2 * 8 * 1024^2 * 64 / 2 * 2.5 FLOPs at 100 TFLOPs; ms and MiB are plain."""
    line = "FA,A100 80GB SXM4,FlashAttention-2,bwd,fp16/bf16,2,8,8,1024,1024,64,yes,TFLOPs,100,x"
    memory = "FA,A100-40GB,FlashAttention-1,both,fp16,16,8,8,128,128,64,no,memory_MB,22.0,x"
    file.write_text(f"{PUBLISHED}\n{line}\n{line.replace('TFLOPs,100', 'ms,1.5')}\n{memory}\n")
    flops, ms, mib = read(file)
    assert flops.measured["time"] == pytest.approx(4 * 2 * 8 * 1024**2 * 64 / 2 * 2.5 / 100e12)
    assert (flops.machine, flops.implementation) == ("a100-sxm-80gb", "flash2")
    assert ms.measured == pytest.approx({"time": 1.5e-3})
    assert (mib.measured, mib.step, mib.direction) == ({"peak_bytes": 22 * 2**20}, 2**20, "both")


def test_fp8_and_rmse_rows_are_kept_and_say_why_they_are_not_modelled(file: Path) -> None:
    fp8 = "FA3,H100,FlashAttention-3 FP8,fwd,fp8 e4m3,2,8,8,1024,1024,64,no,TFLOPs,800,x"
    rmse = "FA3,H100,FlashAttention-3,fwd,fp16,,,,,,,no,RMSE,1.9e-4,x"
    file.write_text(f"{PUBLISHED}\n{fp8}\n{rmse}\n")
    assert [(r.problem, r.unmodelled, list(r.measured)) for r in read(file)] == [
        (None, "fp8 is not modelled", ["time"]),
        (None, "numeric errors are not predicted", ["rmse"]),
    ]


def test_kernels_of_a_call_in_order(file: Path) -> None:
    """Two products and the softmax between them; another shape begins another call."""
    launched = ("nvjet_a", "cunn_SoftMaxForwardReg", "x_gemm_y")
    call = [f"standard,fwd,1,1,{n},64,0,{name},5.5,1000" for n in (512, 1024) for name in launched]
    file.write_text("\n".join([KERNELS, *call]) + "\n")
    kernels = [r.kernel for r in read(file) if r.kernel is not None]
    assert [(k.role, k.call, k.position) for k in kernels] == [
        (role, call, n) for call in (0, 1) for n, role in enumerate(("matmul S", "softmax", "matmul O"))
    ]


def test_nsight_says_what_the_counters_say() -> None:
    """The sample is a part of h200_counters.csv before its columns were taken out; durations there have 2 digits."""
    counted = {r.measured["l2_bytes"]: r for r in shipped_rows() if r.kind == "kernels"}
    rows = read(DATA / "ncu_raw_sample.csv")
    assert len(rows) == 11
    for r in rows:
        other = counted[r.measured["l2_bytes"]]
        assert (r.problem, r.implementation, r.direction) == (other.problem, other.implementation, other.direction)
        assert r.measured["time"] == pytest.approx(other.measured["time"], abs=0.006e-6)
        for quantity in ("dram_read_bytes", "dram_write_bytes"):
            assert r.measured[quantity] == other.measured[quantity]
        assert r.kernel is not None
        assert other.kernel is not None
        assert r.kernel.name.startswith(other.kernel.name[:40])
        for name in ("role", "grid", "block", "registers", "sram_bytes", "exp_instructions"):
            assert getattr(r.kernel, name) == getattr(other.kernel, name)
        assert (r.device, r.machine) == ("NVIDIA H200", "h200-sxm")


def test_nsight_by_option_with_a_profilers_chatter_and_larger_units(tmp_path: Path) -> None:
    lines = (DATA / "ncu_raw_sample.csv").read_text().splitlines()[:3]
    plain = tmp_path / "a.csv"
    plain.write_text("\n".join(["==PROF== Connected to process 1", *lines]) + "\n")
    (row,) = read(plain, [nsight.shape_record("n=4096,d=128")])
    assert (row.line, row.measured["time"]) == (4, pytest.approx(14.976e-6))
    header = "ID,Kernel Name,gpu__time_duration.sum,dram__bytes_read.sum"
    plain.write_text(f"{header}\n,,usecond,Mbyte\n0,void flash_fwd_kernel<3>(),7.5,1.5\n")
    (row,) = read(plain, [nsight.shape_record("n=64,d=64,impl=FA2,causal=yes")])
    assert row.measured == pytest.approx({"time": 7.5e-6, "dram_read_bytes": 1.5e6})
    assert row.problem is not None
    assert row.problem.causal
    assert row.kernel is not None
    assert (row.kernel.name, row.kernel.role) == ("flash_fwd_kernel", "attention")


def test_kernel_and_machine_names() -> None:
    signature = "void at::<unnamed>::cunn_SoftMaxForwardReg<c10::Half, float>(T3 *, const T1 *, T5)"
    assert names.kernel(signature) == "cunn_SoftMaxForwardReg"
    assert names.kernel("void pytorch_flash::flash_fwd_kernel<A<1>, B>(P)") == "pytorch_flash::flash_fwd_kernel"
    devices = {"NVIDIA H200": "h200-sxm", "A100-SXM4-40GB": "a100-sxm-40gb", "A100 80GB SXM4": "a100-sxm-80gb",
               "NVIDIA H100 PCIe": "", "h200_attention.csv": "h200-sxm", "mine.csv": ""}  # fmt: skip
    assert {d: names.machine(d) for d in devices} == devices
    assert names.implementation("cuDNN 9.10.2") == "cudnn"
    assert names.implementation("FlashAttention-3") == "flash3"
    assert names.implementation("xformers") == "xformers"


BAD = {
    "empty": ("", ": is empty"),
    "header only": (f"{CALLS}\n", "has a header and no line below it"),
    "unknown column": (f"{CALLS},peak_extra_byte\n{CALL},1\n",
                       "h200_mine.csv:1: column 'peak_extra_byte' is not known (did you mean 'peak_extra_bytes'?)"),
    "column twice": (f"{CALLS},MS\n{CALL},1\n", "h200_mine.csv:1: column 'ms' is there twice"),
    "no kind": ("impl,pass,n_q,d\nflash2,fwd,64,64\n", "is no kind of measurement that iosim knows"),
    "short line": (f"{CALLS}\n{CALL}\nflash2,fwd\n", "h200_mine.csv:3: 2 cells; the header has 11"),
    "garbled time": (f"{CALLS}\n{CALL.replace('0.25', 'fast')}\n",
                     "h200_mine.csv:2: ms: 'fast' is not a number over 0"),
    "no time": (f"{CALLS}\n{CALL.replace('0.25', '')}\n", "h200_mine.csv:2: ms: is empty"),
    "negative": (f"{CALLS}\n{CALL.replace('0.25', '-1')}\n", "ms: '-1' is not a number over 0"),
    "not finite": (f"{CALLS}\n{CALL.replace('0.25', 'nan')}\n", "ms: 'nan' is not a number over 0"),
    "half a byte": (f"{CALLS}\n{CALL.replace('524288', '1.5')}\n", "peak_extra_bytes: '1.5' is not a whole number"),
    "wrong commas": (f'{CALLS}\n{CALL.replace("524288", chr(34) + "52,42" + chr(34))}\n', "'52,42' is not a number"),
    "pass": (f"{CALLS}\n{CALL.replace('fwd', 'fwdd')}\n", "h200_mine.csv:2: pass: 'fwdd' is not one of fwd"),
    "flag": (f"{CALLS}\n{CALL.replace(',0,0.25', ',maybe,0.25')}\n", "causal: 'maybe' is not one of 0, no"),
    "dtype": (f"{CALLS}\n{CALL.replace('float16', 'float61')}\n", "(did you mean 'float16'?)"),
    "shape": (f"{CALLS}\n{CALL.replace(',512,512,64', ',512,512,4096')}\n",
              "h200_mine.csv:2: d: 4096 is out of range; 1 to 1024 is allowed"),
    "no shape": (f"{CALLS}\n{CALL.replace(',512,512,64', ',,512,64')}\n", "h200_mine.csv:2: n_q: is empty"),
    "no heads": (f"{CALLS}\n{CALL.replace('1,8,512', '1,0,512')}\n", "heads: '0' is not a number over 0"),
    "metric": (f"{PUBLISHED}\nx,H100,standard,fwd,fp16,1,1,1,64,64,64,no,TFLOP,5,\n", "(did you mean 'tflops'?)"),
    "tile": (f"{TILES}\n4,16,4096,128,64,32,x,4,1.9,164,0,24576,\n", "h200_mine.csv:2: stages: 'x' is not a number"),
    "tile without time": (f"{TILES}\n4,16,4096,128,64,32,1,4,,164,0,24576,\n", "h200_mine.csv:2: ms: is empty"),
    "counter": (f"{KERNELS}\nflash2,fwd,1,1,512,64,0,flash_fwd,4.8,many\n", "dram_read_bytes: 'many' is not a number"),
    "quote": (f'{CALLS}\n"flash2,fwd\n', "not CSV"),
    "nsight without units": ("ID,Kernel Name,gpu__time_duration.sum\n1,k,5\n", "the line of units is missing"),
    "nsight without time": ("ID,Kernel Name\n,\n1,k\n", "has no metric gpu__time_duration.sum"),
    "nsight without shapes": ("ID,Kernel Name,gpu__time_duration.sum\n,,ns\n1,k,5\n", "give them with --shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_line(file: Path, case: str) -> None:
    text, words = BAD[case]
    file.write_text(text)
    with pytest.raises(InputError) as error:
        read(file)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


SOUND = (
    f"{CALLS}\n{CALL}\n{CALL}\n",
    f"{TILES}\n4,16,4096,128,64,32,1,4,1.9,164,0,24576,\n",
    f"{PUBLISHED}\nx,H100,standard,fwd,fp16,1,1,1,64,64,64,no,TFLOPs,5,\n",
    f"{KERNELS}\nflash2,fwd,1,1,512,64,0,flash_fwd,4.8,7\n",
    "ID,Kernel Name,gpu__time_duration.sum\n,,ns\n1,k,5\n",
)


@given(st.sampled_from(SOUND), st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(text: str, data: st.DataObject) -> None:
    """Up to three characters are cut out or replaced by others; nothing but rows or an InputError comes of it."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text = (
            text[:at]
            + data.draw(st.sampled_from(("", "0", "-", ",", '"', "\n", "\r", "\0", "e", ".", "é")))
            + text[at + 1 :]
        )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.csv"
        path.write_text(text, encoding="utf-8", newline="")
        try:
            rows = read(path, [nsight.shape_record("n=64,d=64")])
        except InputError as error:
            assert "damaged.csv" in str(error)  # noqa: PT017
        else:
            for row in rows:
                score(row, H200)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path, words in ((tmp_path / "none.csv", "No such file"), (tmp_path, "is a directory"), (binary, "not UTF-8")):
        with pytest.raises(InputError, match=words):
            read(path)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ("id,n,d\n5,64,64\n", "ID: 1 is before the first shape's (5)"),
        ("id,n,d\n1,64,64\n1,128,64\n", "a.shapes.csv:3: id: 1 does not follow 1; IDs must rise"),
        ("n,d\n64,64\n128,64\n", "a.shapes.csv:2: id: the file has no such column"),
        ("id,n,d\n1,sixty,64\n", "a.shapes.csv:2: n: 'sixty' is not a number over 0"),
    ],
)
def test_shapes_beside_a_file(tmp_path: Path, shapes: str, words: str) -> None:
    (tmp_path / "a.csv").write_text("ID,Kernel Name,gpu__time_duration.sum\n,,ns\n1,k,5\n")
    (tmp_path / "a.shapes.csv").write_text(shapes)
    with pytest.raises(InputError) as error:
        read(tmp_path / "a.csv")
    assert words in str(error.value)


def test_a_unit_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ID,Kernel Name,gpu__time_duration.sum\n,,fortnight\n1,k,5\n")
    with pytest.raises(InputError, match="unit 'fortnight' is not one of byte"):
        read(tmp_path / "a.csv", [nsight.shape_record("n=64,d=64")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n=64,d", "'d' is not NAME=VALUE"),
        ("n=64,dim=64", "column 'dim' is not known"),
        ("n=64,d=", "'d' is not NAME=VALUE"),
    ],
)
def test_a_shape_option_that_is_not_one(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        nsight.shape_record(text)
    assert words in str(error.value)
