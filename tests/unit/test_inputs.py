"""A user's own tensors: what is read from a file, what is refused, and that checks use it."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iosim
from iosim.check import tensors
from iosim.check.given import LARGEST, LARGEST_OTHER, MOST_SCORE

CODES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "int64": "I64",
         "float8_e4m3fn": "F8_E4M3"}  # fmt: skip
RANDOM = np.random.default_rng(7)
Q, DO = (RANDOM.standard_normal((2, 4, 6, 8)).astype(np.float32) for _ in range(2))
K, V = (RANDOM.standard_normal((2, 2, 10, 8)).astype(np.float32) for _ in range(2))
S = RANDOM.standard_normal((2, 4, 6, 10)).astype(np.float32)
ALL = {"q": Q, "k": K, "v": V, "do": DO, "s": S}


def safetensors(arrays: Mapping[str, Any], pad: int = 0) -> bytes:
    """A file as the format says: 8 bytes of length, a JSON header, the elements."""
    header: dict[str, Any] = {"__metadata__": {"by": "a test"}}
    data = b""
    for name, x in arrays.items():
        offsets = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": CODES[x.dtype.name], "shape": list(x.shape), "data_offsets": offsets}
        data += x.tobytes()
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def npz(arrays: Mapping[str, Any]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def file_of(folder: Path, kind: str, arrays: Mapping[str, Any]) -> Any:
    if kind == "arrays":
        return arrays
    path = folder / f"mine.{kind}"
    path.write_bytes((safetensors if kind == "safetensors" else npz)(arrays))
    return path


KINDS = ["safetensors", "npz", "arrays"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rows_are_those_of_the_tensors(tmp_path: Path, kind: str, layout: str) -> None:
    turned = {n: x if layout == "bhsd" or n == "s" else x.transpose(0, 2, 1, 3) for n, x in ALL.items()}
    inputs = iosim.load_inputs(file_of(tmp_path, kind, {n.upper(): x for n, x in turned.items()}), layout=layout)
    problem = inputs.problem(causal=True)
    assert problem == iosim.Attention(
        batch=2, heads=4, kv_heads=2, n_q=6, n_k=10, d=8, causal=True, dtype="fp32", lse=False
    )
    for computes, names in (("forward", ("Q", "K", "V")), ("backward", ("Q", "K", "V", "dO")), ("softmax", ("S",))):
        source = inputs.source(problem, computes)
        assert source.values_std is None
        for name in names:
            wanted = ALL[name.lower()]
            for batch, head in np.ndindex(wanted.shape[:2]):
                got = source.rows(name, batch, head, (2, 5))
                assert got.dtype == np.float32
                assert (got == wanted[batch, head, 2:5]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_missing_leading_axes_are_1(tmp_path: Path, kind: str) -> None:
    q, k, v = Q[0], K[0, 0], V[:1, :1]
    problem = iosim.load_inputs(file_of(tmp_path, kind, {"q": q, "k": k, "v": v})).problem()
    assert (problem.batch, problem.heads, problem.kv_heads, problem.n_q, problem.n_k) == (1, 4, 1, 6, 10)
    turned = {"query": q.transpose(1, 0, 2), "key": k, "value": v.transpose(0, 2, 1, 3)}
    inputs = iosim.load_inputs(file_of(tmp_path, kind, turned), layout="bshd")
    assert inputs.problem() == problem
    assert (inputs.source(problem, "forward").rows("Q", 0, 3, (0, 6)) == q[3]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_alone_give_the_shape_of_a_softmax(tmp_path: Path, kind: str) -> None:
    problem = iosim.load_inputs(file_of(tmp_path, kind, {"S": S})).problem()
    assert (problem.batch, problem.heads, problem.n_q, problem.n_k, problem.d) == (2, 4, 6, 10, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "as_dtype"), [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"),
                                                 ("float8_e4m3fn", "fp8_e4m3")])  # fmt: skip
def test_the_dtype_is_that_of_the_file(tmp_path: Path, kind: str, dtype: str, as_dtype: str) -> None:
    if kind == "npz" and dtype in ("bfloat16", "float8_e4m3fn"):
        pytest.skip(f"numpy has no {dtype}")
    rounded = {n: x.astype(dtype) for n, x in ALL.items()}
    inputs = iosim.load_inputs(file_of(tmp_path, kind, rounded))
    assert inputs.problem().dtype == as_dtype
    got = inputs.source(inputs.problem(), "forward").rows("K", 1, 1, (0, 10))
    assert (got == rounded["k"][1, 1].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_rounded_to_a_dtype_that_is_given(tmp_path: Path, dtype: str) -> None:
    inputs = iosim.load_inputs(file_of(tmp_path, "npz", {n: x.astype(dtype) for n, x in ALL.items()}))
    got = inputs.source(inputs.problem(dtype="bf16"), "forward").rows("Q", 0, 0, (0, 6))
    assert (got == Q[0, 0].astype(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("pad", range(4))
def test_elements_may_lie_anywhere(tmp_path: Path, pad: int) -> None:
    """The header's length is not always a multiple of an element's size."""
    path = tmp_path / "mine.safetensors"
    path.write_bytes(safetensors({n: x.astype(ml_dtypes.bfloat16) for n, x in ALL.items()}, pad))
    inputs = iosim.load_inputs(path)
    got = inputs.source(inputs.problem(), "forward").rows("V", 1, 0, (0, 10))
    assert (got == V[1, 0].astype(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    """1, 2 and -1.5 in fp16 are 3c00, 4000 and be00."""
    path = tmp_path / "x.safetensors"
    entry = b'"%s":{"dtype":"F16","shape":[1,1],"data_offsets":[%d,%d]}'
    header = b"{" + b",".join(entry % (n, 2 * i, 2 * i + 2) for i, n in enumerate((b"q", b"k", b"v"))) + b"}"
    path.write_bytes(bytes([len(header), 0, 0, 0, 0, 0, 0, 0]) + header + bytes.fromhex("003c004000be"))
    inputs = iosim.load_inputs(path)
    source = inputs.source(inputs.problem(), "forward")
    assert [float(source.rows(n, 0, 0, (0, 1))[0, 0]) for n in "QKV"] == [1.0, 2.0, -1.5]


def test_fortran_order_and_big_endian(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", q=np.asfortranarray(Q), k=K.astype(">f4"), v=V, mask=np.zeros(3, bool))
    inputs = iosim.load_inputs(tmp_path / "x.npz")
    source = inputs.source(inputs.problem(), "forward")
    assert (source.rows("Q", 1, 2, (0, 6)) == Q[1, 2]).all()
    assert (source.rows("K", 1, 1, (0, 10)) == K[1, 1]).all()


# ---------------------------------------------------------------- checks use them


@pytest.mark.parametrize(
    "dataflow", ["standard", "flash2", "split-kv", "flash-backward", "standard-backward", "softmax-safe"]
)
def test_checks_pass_on_a_users_tensors(tmp_path: Path, dataflow: str) -> None:
    path = file_of(tmp_path, "safetensors", {n: x.astype(np.float16) for n, x in ALL.items()})
    inputs = iosim.load_inputs(path)
    done = iosim.run(inputs.problem(causal=True), dataflow=dataflow, inputs=inputs).check
    assert done is not None
    assert done.status == "passed", done.detail
    assert done.rows_checked == done.rows_total


def test_what_is_checked_is_what_was_given() -> None:
    """softmax-naive overflows from exp(88.7) on: scores of 200 do, scores of 20 do not."""
    for factor, status in ((20, "passed"), (200, "failed")):
        scores = np.clip(S, -1, 1) * np.float32(factor)
        done = iosim.run(
            iosim.Attention(n_q=6, n_k=10, d=8, batch=2, heads=4), dataflow="softmax-naive", inputs={"s": scores}
        ).check
        assert done is not None
        assert done.status == status
    problem = iosim.Attention(n_q=6, n_k=10, d=8, batch=2, heads=4, kv_heads=2)
    large = [iosim.run(problem, inputs={"q": Q, "k": K, "v": V * x}).check for x in (np.float32(1), np.float32(4))]
    assert large[1].max_abs_error > 3 * large[0].max_abs_error  # type: ignore[union-attr]  # 4 exactly, but for subnormals


def test_the_seed_makes_do_where_there_is_none() -> None:
    inputs = iosim.load_inputs({"q": Q, "k": K, "v": V})
    problem = inputs.problem()
    one, two = (inputs.source(problem, "backward", seed).rows("dO", 0, 0, (0, 6)) for seed in (1, 2))
    assert not (one == two).any()
    own = iosim.load_inputs(ALL)
    assert (own.source(problem, "backward", 2).rows("dO", 0, 0, (0, 6)) == DO[0, 0]).all()


# ---------------------------------------------------------------- what is refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "no tensor q, k, v or s; it has no tensor"),
    "other names": ({"weight": Q}, "no tensor q, k, v or s; it has weight"),
    "no v": ({"q": Q, "k": K, "mask": S}, "no tensor v or value, which attention reads; it has q, k, mask"),
    "no q": ({"k": K, "v": V}, "no tensor q or query"),
    "twice": ({"q": Q, "Query": Q, "k": K, "v": V}, "q and Query are the same tensor"),
    "one axis": ({"q": Q[0, 0, 0], "k": K, "v": V}, "q has the shape (8,); 2 to 4 axes are allowed"),
    "five axes": ({"q": Q[None], "k": K, "v": V}, "q has the shape (1, 2, 4, 6, 8); 2 to 4 axes"),
    "integers": ({"q": Q, "k": K.astype(np.int64), "v": V}, "k"),
    "n_k": ({"q": Q, "k": K, "v": V[:, :, :9]}, "v with shape (2, 2, 9, 8) has n_k 9, k with shape (2, 2, 10, 8) has"),
    "d": ({"q": Q, "k": K[..., :4], "v": V}, "k with shape (2, 2, 10, 4) has d 4, q with shape (2, 4, 6, 8) has 8"),
    "batch": ({"q": Q, "k": K[:1], "v": V}, "has batch 1, q with shape (2, 4, 6, 8) has 2"),
    "heads": ({"q": Q[:, :3], "k": K, "v": V}, "heads: 3 is not a multiple of kv_heads (2)"),
    "dO": ({"q": Q, "k": K, "v": V, "do": DO[:, :, :5]}, "do with shape (2, 4, 5, 8) has n_q 5"),
    "s": ({"q": Q, "k": K, "v": V, "s": S[..., :9]}, "s with shape (2, 4, 6, 9) has n_k 9"),
    "empty": ({"q": Q[:, :, :0], "k": K, "v": V}, "n_q: 0 is out of range"),
    "mixed": ({"q": Q, "k": K.astype(np.float16), "v": V}, "k is float16 and q float32; give the dtype"),
    "float64": ({"q": Q.astype(np.float64), "k": K, "v": V}, "q: float64 is no format of the data of a kernel"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, kind: str, case: str) -> None:
    arrays, words = REFUSED[case]
    with pytest.raises(iosim.InputError) as caught:
        iosim.load_inputs(file_of(tmp_path, kind, arrays)).problem()
    assert words in str(caught.value)
    assert str(caught.value).startswith("inputs: ")


@pytest.mark.parametrize("field", ["n_q", "n_k", "d", "d_v", "batch", "heads", "kv_heads"])
def test_a_problem_that_the_tensors_contradict(field: str) -> None:
    inputs = iosim.load_inputs(ALL)
    right = inputs.problem()
    with pytest.raises(iosim.InputError, match=rf"^{field}: 12 was given, and \w+ of arrays has"):
        inputs.problem(**{field: 12})
    shape = {name: getattr(right, name) for name in ("n_q", "n_k", "d", "d_v", "batch", "heads", "kv_heads")}
    with pytest.raises(iosim.InputError, match=f"^{field}: "):
        iosim.run(iosim.Attention(**shape | {field: 1 if field == "kv_heads" else 12}), inputs=inputs)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (np.nan, "fp32", "v at batch 1, head 0, row 7, column 3 is nan; every number must be finite"),
        (-np.inf, "bf16", "is -inf; every number must be finite"),
        (65520.0, "fp16", "is 65520; the largest number of fp16 is 65504"),
        (2 * LARGEST_OTHER, "fp32", "the check takes magnitudes up to 1.1e+12"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_no_check_can_take(tmp_path: Path, kind: str, value: float, dtype: str, words: str) -> None:
    v = V.copy()
    v[1, 0, 7, 3] = value
    inputs = iosim.load_inputs(file_of(tmp_path, kind, {"q": Q, "k": K, "v": v}))
    with pytest.raises(iosim.InputError) as caught:
        inputs.source(inputs.problem(dtype=dtype), "forward")
    assert words in str(caught.value)
    assert iosim.run(inputs.problem(dtype=dtype), inputs=inputs, check=False).check is None  # nothing is read


def test_scores_beyond_any_bound() -> None:
    """Of one element, |q| |k| / sqrt(1): a little below the limit is checked, a little above refused."""
    for factor, refused in ((0.99, False), (1.01, True)):
        one = np.ones((1, 1), np.float32)
        inputs = iosim.load_inputs({"q": one * np.float32(factor * MOST_SCORE), "k": one, "v": one})
        if refused:
            with pytest.raises(iosim.InputError, match=r"q and k make scaled scores of up to 2\.82e"):
                inputs.source(inputs.problem(), "forward")
        else:
            inputs.source(inputs.problem(), "forward")
    large = iosim.load_inputs({"s": S * np.float32(2 * LARGEST["S"])})
    with pytest.raises(iosim.InputError, match=r"magnitudes up to 1\.68e"):
        large.source(large.problem(), "softmax")


@pytest.mark.filterwarnings("error")
def test_the_largest_that_are_taken_make_no_overflow() -> None:
    top = {n: np.clip(x, -1, 1) * np.float32(LARGEST_OTHER if n in ("v", "do") else 1) for n, x in ALL.items()}
    top["s"] = np.clip(S, -1, 1) * np.float32(LARGEST["S"])
    inputs = iosim.load_inputs(top)
    for dataflow in ("flash2", "standard", "flash-backward", "standard-backward", "softmax-online"):
        done = iosim.run(inputs.problem(), dataflow=dataflow, hardware="h200-sxm", inputs=inputs).check
        assert done is not None
        assert done.status == "passed", done.detail


@pytest.mark.parametrize("bad", [5, {"q": [[1.0], [1.0, 2.0]]}, {"q": np.zeros((2, 2), int)}, {"q": "text"}])
def test_what_is_no_array(bad: Any) -> None:
    with pytest.raises(iosim.InputError, match=r"^inputs: "):
        iosim.load_inputs(bad)


# ---------------------------------------------------------------- files that strangers wrote


def refusal(path: Path) -> str:
    answer = reading(path)
    assert answer is not None
    return answer


def reading(path: Path, dtype: str = "fp32") -> str | None:
    """Why a file is refused, in one line; None where it is not."""
    try:
        inputs = iosim.load_inputs(path)
        inputs.source(inputs.problem(dtype=dtype), "forward")
    except iosim.InputError as error:
        answer = str(error)
    else:
        return None
    assert "\n" not in answer
    assert len(answer) < 5000
    return answer


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.npz").mkdir()
    assert "is not a regular file" in refusal(tmp_path / "x.npz")
    assert "No such file" in refusal(tmp_path / "y.npz")
    assert "must end in .safetensors or .npz" in refusal(tmp_path / "y.npy")
    assert "cannot be read" in refusal(Path("a\0b.npz"))
    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(b"")
        assert f"is not a{'n npz' if name == 'a.npz' else ' safetensors'} file" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32"}, "q: shape (2, 4, 6, 8) of F32 takes 1,536 bytes"),
        ({"dtype": "I8"}, "q: its dtype is 'I8'; F16, BF16, F32, F64, F8_E4M3 can be read"),
        ({"dtype": ["F16"]}, "q: its dtype is"),
        ({"shape": [2**40, 2**40]}, "q: shape (1099511627776, 1099511627776) of F16 takes"),
        ({"shape": [2, 4, 6, -8]}, "q: its shape has -8"),
        ({"shape": [2, 4, 6, True]}, "q: its shape has True"),
        ({"shape": 48}, "q: its shape is not a list"),
        ({"data_offsets": [0, 10**15]}, "q: its data_offsets (0, 1000000000000000) do not lie in"),
        ({"data_offsets": [8, 0]}, "do not lie in"),
        ({"data_offsets": [0]}, "do not lie in"),
        ({"data_offsets": None}, "q: its data_offsets is not a list"),
    ],
)
def test_safetensors_entries_that_lie(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    whole = safetensors({n: x.astype(np.float16) for n, x in ALL.items()})
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header["q"] |= entry
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    assert words in refusal(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "its header is not a JSON object"),
        (b'{"q": 1}', "q: its header entry is not a JSON object"),
        (b'{"q": {}, "q": {}}', "a key is given twice"),
        (b"{", "its header is not valid JSON"),
        (b"\xff\xfe", "its header is not valid JSON"),
        (b"[" * 100_000, "its header is not valid JSON"),
        (b'{"q": ' + b"9" * 10_000 + b"}", "its header is not valid JSON"),
    ],
)
def test_safetensors_headers_that_are_none(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert words in refusal(tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 100])
def test_a_header_is_bounded_before_it_is_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    assert "does not fit its 10 bytes" in refusal(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**25))
        file.truncate(2**26)  # a hole
    assert "at most 16,777,216 are read" in refusal(tmp_path / "x.safetensors")


def archive(folder: Path, header: str, data: bytes, how: int = zipfile.ZIP_DEFLATED) -> Path:
    path = folder / "x.npz"
    text = header.encode()
    with zipfile.ZipFile(path, "w", how) as out:
        for name in "qkv":
            out.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (9, 9), }", "q: shape (9, 9) of float32 takes"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999, 999999999), }", "the archive has others"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 1), }", "which is no size"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }", "no order and shape"),
        ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1, 4), }", "no order and shape"),
        (
            "{'descr': '<i8', 'fortran_order': False, 'shape': (1, 4), }",
            "q: its dtype is int64; float16, float32, float64 can be read",
        ),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1, 4), }", "q: its dtype is '|O'"),
        ("{'descr': '<V2', 'fortran_order': False, 'shape': (1, 4), }", "numpy keeps no bfloat16"),
        ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1, 4), }", "q: its dtype is ["),
        ("__import__('os').abort()", "no dtype"),
        (" " * 20_000, "at most 10,000 are read"),
    ],
)
def test_npy_headers_that_lie(tmp_path: Path, header: str, words: str) -> None:
    assert words in refusal(archive(tmp_path, header, b"\0" * 16))


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tensors of 64 MB of zeros in 64 kB each, on a host with 1 MB: refused with less than 1 MB taken."""
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (16000, 1000), }"
    path = archive(tmp_path, header, b"\0" * 64_000_000)
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(tensors, "available_memory", lambda: 10**6)
    tracemalloc.start()
    try:
        assert "q: 0.1 GB, and this host has 0.0 GB of memory free; --no-check leaves it unread" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_other_compressions_and_other_members(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4), }"
    assert "neither stored nor deflated" in refusal(archive(tmp_path, header, b"\0" * 16, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(tmp_path / "y.npz", "w") as out:
        out.writestr("q.npy", b"a pickle, say")
    assert "q: is not an array in npy format" in refusal(tmp_path / "y.npz")


FILES = {kind: file({n: x[:1, :2, :4].astype(np.float16) for n, x in ALL.items() if n in "qkv"})
         for kind, file in (("safetensors", safetensors), ("npz", npz))}  # fmt: skip


def survives(folder: Path, kind: str, content: bytes) -> None:
    """Whatever the bytes, the answer is tensors or an InputError of one line."""
    path = folder / f"x.{kind}"
    path.write_bytes(content)
    reading(path)


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=100)
@given(st.data())
def test_any_damage_to_a_file_is_one_line(tmp_path_factory: pytest.TempPathFactory, kind: str, data: Any) -> None:
    whole = bytearray(FILES[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["byte", "cut", "insert", "field"])):
            case "byte":
                whole[at] = data.draw(st.integers(0, 255))
            case "cut":
                del whole[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                whole[at:at] = data.draw(st.binary(max_size=20))
            case _:  # zip keeps its sizes and offsets in fields of 2, 4 and 8 bytes
                width = data.draw(st.sampled_from([2, 4, 8]))
                whole[at : at + width] = data.draw(st.sampled_from([b"\0", b"\xff", b"\x7f"])) * width
        if not whole:
            break
    survives(tmp_path_factory.getbasetemp(), kind, bytes(whole))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(CODES.values())),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F16", "F32", "BF16", "F64"]) | values,
        "shape": st.lists(st.integers(-1, 9) | st.integers(), max_size=5) | values,
        "data_offsets": st.lists(st.integers(-1, 99) | st.integers(), min_size=2, max_size=2) | values,
    },
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["q", "K", "v", "s", "do", "x"]), entries | values), st.binary(max_size=100))
def test_any_json_header_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: bytes
) -> None:
    text = json.dumps(header).encode()
    survives(tmp_path_factory.getbasetemp(), "safetensors", struct.pack("<Q", len(text)) + text + data)


npy_values = st.sampled_from(
    ["'<f4'", "'<f2'", "False", "True", "(2, 3)", "(1, 2, 2, 4)", "()", "(9999999999,)", "None"]
)


@settings(max_examples=100)
@given(st.tuples(npy_values, npy_values, npy_values) | st.tuples(*[st.text(max_size=9)] * 3), st.binary(max_size=100))
def test_any_npy_header_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, fields: tuple[str, str, str], data: bytes
) -> None:
    header = "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}".format(*fields)
    path = archive(tmp_path_factory.getbasetemp(), header, data)
    survives(tmp_path_factory.getbasetemp(), "npz", path.read_bytes())
