"""What is fuzzed: each kind of file that iosim reads, with valid seeds and its reader; and the command line itself.

The law is `attempt`: what is read is taken or refused with one printable line, in time and in bounded memory.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import numpy as np

from iosim.blockmask import load_block_mask
from iosim.check.given import load_inputs
from iosim.cli import cli, main
from iosim.cli.folder import require_replaceable
from iosim.cli.problem_file import load_problem
from iosim.errors import IosimError
from iosim.hardware import load_hardware
from iosim.kernels import load_kernel
from iosim.problem import Attention
from iosim.report import diff as diff_report
from iosim.report import machines as machine_report
from iosim.report import pareto as pareto_report
from iosim.report import sweep as sweep_report
from iosim.report import text as text_report
from iosim.study.arrivals import load_arrivals
from iosim.study.diff import diff
from iosim.study.models import PHASES, load_model
from iosim.study.pareto import pareto
from iosim.study.ragged import lengths_of
from iosim.study.run import compare
from iosim.study.serving import load_trace
from iosim.study.sweep.grid import read_grids
from iosim.study.sweep.store import open_store
from iosim.study.sweep.work import Batch, work
from iosim.study.validate import nsight
from iosim.study.validate.readers import read as read_measurements
from iosim.study.validate.score import score
from tests.fuzz import damage
from tests.model_configs import CONFIGS

ROOT = Path(__file__).parents[2]
SECONDS = 30.0  # of one try
BYTES = 2**30  # that one try may take
LONGEST = 20_000  # characters of a line that says what is wrong


class LawError(AssertionError):
    """The law is broken."""


@dataclass(frozen=True)
class Kind:
    """A kind of input: `seeds` are valid, `ways` damage them, `read` reads a file with the suffix `suffix`."""

    name: str
    suffix: str
    seeds: Callable[[], Sequence[bytes]]
    ways: tuple[damage.Damage, ...]
    read: Callable[[Path, Random], object]


# ---------------------------------------------------------------- the law


@contextmanager
def limited(seconds: float = SECONDS, more: int = BYTES) -> Iterator[None]:
    """What runs in it gets a TimeoutError after so many seconds of work, or ten times as many where it only waits.

    And a MemoryError for `more` bytes than there are now.  Work is what this process does, not what a busy machine
    makes of it.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 10 * seconds))
    old, limits = [signal.signal(name, late) for name, _, _ in timers], resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    for _, timer, most in timers:
        signal.setitimer(timer, most)
    try:
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for (name, _, _), handler in zip(timers, old, strict=True):
            signal.signal(name, handler)


def attempt(kind: Kind, number: int, folder: Path, seconds: float = SECONDS) -> bool:
    """Try number so and so of a kind, the same each time: whether the input was taken.  Raises LawError."""
    dice = Random(f"{kind.name} {number}")  # noqa: S311 - no secret
    path = folder / f"x{kind.suffix}"
    for old in folder.glob("x*"):  # such as the log of a store
        old.unlink()
    path.write_bytes(damage.damaged(dice, kind.seeds(), kind.ways))
    try:
        with warnings.catch_warnings(record=True) as warned, limited(seconds):
            warnings.simplefilter("always")
            taken = lawful(partial(kind.read, path, dice))
    except LawError:
        raise
    except BaseException as error:
        raise LawError(f"{kind.name} {number}: {type(error).__name__}: {error!s:.300}") from error
    if warned:
        raise LawError(f"{kind.name} {number}: warns: {warned[0].message}")
    return taken


def lawful(read: Callable[[], object]) -> bool:
    """Whether a reader takes what it is given; it may refuse it with a line of ours, and with nothing else."""
    try:
        taken = read() is not False
    except IosimError as error:
        said = str(error)
        if not said or not said.isprintable() or len(said) > LONGEST:
            raise LawError(f"no line of words: {said[:200]!r} ({len(said)} characters)") from error
        return False
    return taken


class Given(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str


def command(*args: str) -> Given:
    """`iosim ARGS` in this process, with streams that encode as a terminal does."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before, sys.argv, code = sys.argv, ["iosim", *args], 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return Given(code, *texts)


def answered(*args: str) -> Given:
    """The answer of a command; a LawError where it is none."""
    given = command(*args)
    if given.code not in (0, 1, 2, 3) or "Traceback" in given.err:
        raise LawError(f"iosim {' '.join(args)!r:.300}: exit {given.code}: {given.err:.300}")
    lines = given.err.splitlines()
    usage = given.err.startswith("Usage: ")  # of a group without a command
    if given.code in (2, 3) and not usage and (given.out or len(lines) != 1 or not lines[0].isprintable()):
        raise LawError(
            f"iosim {' '.join(args)!r:.300}: exit {given.code} says {given.err!r:.300} and {given.out!r:.80}"
        )
    return given


# ---------------------------------------------------------------- seeds


def files(*patterns: str, lines: int = 0) -> list[bytes]:
    found = [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [b"\n".join(one.splitlines()[:lines]) + b"\n" for one in found] if lines else found


@cache
def profiles() -> list[bytes]:
    return files("hw_profiles/*.toml")


@cache
def kernels() -> list[bytes]:
    return files("iosim/kernels/*.toml")


SWEEPS = (
    'schema = "iosim.sweep/1"\n[[grid]]\ndataflow = ["flash2", "standard"]\nhw = "mp31"\nn = "64..256:x2"\nd = [64]\n'
    'causal = [true, false]\n"hw.sram.capacity_kib" = [128, 192]\nstages = "1,2,2/1"\nblock_q = "64"\n',
    'schema = "iosim.sweep/1"\n[[grid]]\nkernel = "flash3"\nhw = ["h200-sxm"]\nfidelity = ["fair"]\nn = 128\nd = 64\n'
    'heads = "1..4"\n[[grid]]\nn = 64\nd = "32..64:+32"\ndtype = ["fp16", "bf16"]\nsoftcap = 2.5\nwindow = 16\n',
)


def arrays() -> dict[str, Any]:
    made = np.arange(32, dtype=np.float16).reshape(1, 2, 2, 8) / 32
    return {"q": made, "k": made[:, :1], "v": made[:, :1], "other": made}


@cache
def tensors() -> list[bytes]:
    header, data = {}, b""
    for name, x in arrays().items():
        header[name] = {"dtype": "F16", "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header | {"__metadata__": {"by": "a test"}}).encode()
    return [len(text).to_bytes(8, "little") + text + data]


@cache
def archives() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        save(out, **arrays())
        found.append(out.getvalue())
    return found


@cache
def masks() -> list[bytes]:
    one, many = io.BytesIO(), io.BytesIO()
    np.save(one, np.eye(4, dtype=bool))
    np.savez_compressed(many, mask=np.eye(4, dtype=np.float32))
    return [one.getvalue(), many.getvalue()]


@cache
def measurements() -> list[bytes]:
    shipped = ("attention", "counters", "triton_tiles")
    return [
        *files(*(f"iosim/data/h200_{name}.csv" for name in shipped), lines=5),
        *files("iosim/data/published_attention.csv", lines=5),
        b"impl,pass,batch,heads,n,d,causal,ms,note,causal_align,device\nflash2,fwd,1,1,64,64,1,0.25,,top-left,H200\n",
    ]


NSIGHT = (
    b"ID,Kernel Name,gpu__time_duration.sum,dram__bytes_read.sum,launch__grid_size,launch__occupancy_limit_warps\n"
    b",,usecond,Mbyte,,block\n0,void flash_fwd_kernel<3>(),7.5,1.5,8,2\n1,nvjet_x,7.5,1.5,8,2\n"
)
CALL = b"impl,pass,batch,heads,n,d,causal,ms,peak_extra_bytes\nflash2,fwd,1,1,64,64,1,0.25,32768\n"
TRACE = b'{"step": 0, "context": 4096, "new": 1}\n{"step": 0, "context": 17, "new": 64}\n{"step": 1, "context": 5}\n'
ARRIVALS = b'{"arrival": 0, "prompt": 512, "output": 64}\n{"arrival": 0.25, "prompt": 17, "output": 1}\n'
PROBLEM = b"""schema = "iosim.problem/1"
n = 64
d = 64
heads = 8
kv_heads = 2
causal = true
lengths = [512, "1:77"]
page = 16
cache_dtype = "int8"
dropout = 0.1
"""


@cache
def configs() -> list[bytes]:
    return [json.dumps(one).encode() for one in CONFIGS.values()]


@cache
def results() -> list[bytes]:
    """Small results of commands whose results can be compared."""
    small = ("-n", "64", "-d", "64", "--no-check", "--json")
    return [answered(*args).out.encode() for args in (
        ("run", *small), ("run", "--hw", "mp31", "--hw", "mp22", *small), ("run", *small, "--causal"),
        ("check", "-n", "64", "-d", "64", "--json"))]  # fmt: skip


@cache
def indices() -> list[bytes]:
    return [json.dumps({"schema": "iosim.report/1", "files": ["report.json"], "reports": {"io": []}}).encode()]


@cache
def stores() -> list[bytes]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.db"
        vary = ("--vary", "block_q=16,32,63", "--vary", "stages=1,2")
        answered("sweep", "-n", "64", "-d", "64", *vary, "--workers", "0", "--store", str(path), "--csv")
        with closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return [path.read_bytes()]


# ---------------------------------------------------------------- readers


def read_profile(path: Path, dice: Random) -> None:
    machine = load_hardware(path)
    if dice.random() < 0.3:
        machine_report.show_text(machine)
        json.dumps(machine_report.document([machine], numbers=True), allow_nan=False)
        machine_report.numbers_as_csv(machine)


def run_machine(path: Path, dice: Random) -> None:
    shape = Attention(n_q=dice.choice((1, 64, 300)), d=dice.choice((8, 64)), causal=dice.random() < 0.5)
    found = compare(shape, dataflows=[dice.choice(("flash2", "standard"))], hardware=[str(path)], check=False)
    text_report.render(found)


def run_kernel(path: Path, dice: Random) -> None:
    flow = load_kernel(str(path)).dataflow()
    if dice.random() < 0.1:
        compare(Attention(n_q=64, d=64), dataflows=[flow], hardware=["h200-sxm"], check=False)


def read_sweep(path: Path, dice: Random) -> None:
    for grid in read_grids(str(path)):
        first = [c for _, c in zip(range(4), grid.configurations(), strict=False) if c.job is not None]
        if first and dice.random() < 0.05:
            work(Batch.of(first[:1]))


def read_inputs(path: Path, dice: Random) -> None:
    inputs = load_inputs(path, layout=dice.choice(("bhsd", "bshd")))
    inputs.source(inputs.problem(**dice.choice(({}, {"dtype": "fp16"}, {"n_q": 2}))), "forward")


def read_calls(path: Path, dice: Random) -> None:
    rows = read_measurements(path, [nsight.shape_record("n=64,d=64")])
    if rows and dice.random() < 0.05:
        score(dice.choice(rows), load_hardware("h200-sxm"))


def run_validate(path: Path, dice: Random) -> bool:
    form = dice.choice(((), ("--json",), ("--csv",)))
    return answered("validate", str(path), "--hw", "h200-sxm", *form).code == 0


def read_config(path: Path, dice: Random) -> None:
    case = load_model(str(path)).case(n=dice.choice((1, 4096)), phase=dice.choice(PHASES))
    assert case.kv_bytes >= 0


def read_result(path: Path, dice: Random) -> None:
    other = path.with_name("other.json")
    other.write_bytes(dice.choice(results()))
    found = diff(*dice.choice(((str(path), str(other)), (str(other), str(path)))))
    diff_report.render(found)
    json.dumps(diff_report.document(found, {}), allow_nan=False)


def run_result(path: Path, dice: Random) -> bool:
    del dice
    return answered("rerun", str(path)).code in (0, 1)


def read_store(path: Path, dice: Random) -> None:
    with open_store(str(path), new=dice.random() < 0.5) as store:
        rows = list(store.read())
    sweep_report.render(rows, None, "a.db")
    json.dumps(sweep_report.document(rows, None, "a.db", {}), allow_nan=False)
    sweep_report.rows_as_csv(rows)
    pareto_report.render(pareto(rows), "a.db")


def read_index(path: Path, dice: Random) -> None:
    del dice
    folder = path.parent / "report"
    folder.mkdir(exist_ok=True)
    path.rename(folder / "report.json")
    require_replaceable(str(folder), "report.json", "iosim.report/1", force=False)


# ---------------------------------------------------------------- the command line

SHAPE = ("-n", "64", "-d", "64")
LINES = (
    ("run", *SHAPE, "--no-check"),
    ("run", "--lengths", "16,32:64", "-d", "64", "--no-check"),
    ("show", "flash2", *SHAPE),
    ("check", *SHAPE),
    ("explain", *SHAPE),
    ("whatif", *SHAPE, "--vary", "stages=1,2"),
    ("sensitivity", *SHAPE),
    ("tune", *SHAPE, "--block-q", "64", "--block-k", "64", "--stages", "1", "--groups", "1"),
    ("sweep", *SHAPE, "--vary", "stages=1,2", "--workers", "0", "--store", "a.db"),
    ("pareto", "no.db"),
    ("hw", "show", "mp31"),
    ("hw", "list"),
    ("report", "memory", "-n", "64"),
    ("report", "io", "-n", "64", "--dataflow", "flash2"),
    ("report", "roofline", "-n", "64", "--dataflow", "flash2"),
    ("report", "trend", "-n", "64", "--dataflow", "flash2"),
    ("report", "timeline", *SHAPE),
    ("report", "serving", "--context", "64", "--batch", "1", "--new", "1"),
    ("trace", *SHAPE, "-o", "-"),
    ("serve", "no.jsonl"),
    ("precision", "--n", "64", "--queries", "8", "--dataflow", "flash2", "--dtype", "fp16"),
    ("validate", "no.csv", "--shape", "n=64,d=64"),
    ("diff", "no.json", "no.json"),
    ("rerun", "no.json"),
    ("completion", "bash"),
)
VALUES = (
    *("flash2", "standard", "flash-backward", "mp31", "mp22", "h200-sxm", "fp8", "fp32", "causal", "chip", "2,1", "8"),
    *("32", "100", "0.25", "training", "full", "longest-first", "0..4", "all", "n=64", "block_q=16,32", "x.png", "1,1"),
    *("stages=1..3", "d=1.5..1.7e308:x1.5", "n=1..1e308:x1e308", "hw.processor.count=1,2", "a=", "=", "a=b=c", "./no"),
    *("9" * 30 + ",1", "\udcff", "./no.toml", "./no.py", ".", "/", "/dev/null"),
)
LEFT_OUT = ("help", "scheduler", "workers", "output", "force")  # these wait for a network, start processes, write files


def options_of(dice: Random, _: bytes) -> bytes:
    """A command line with options of its command, of another, or of none; JSON."""
    args = list(dice.choice(LINES))
    here: Any = cli
    context = click.Context(cli)
    for word in args:
        here = here.get_command(context, word) if isinstance(here, click.Group) else here
    for _n in range(dice.choice((1, 1, 2, 3))):
        values = (*damage.NUMBERS, *damage.WORDS, *VALUES, *VALUES)
        value = dice.choice([v for v in values if "\0" not in v and "\ud800" not in v])
        match dice.randrange(8):
            case 0:
                args[dice.randrange(len(args))] = value
            case 1:
                del args[dice.randrange(len(args))]
                args = args or ["run"]
            case 2:
                args.append(value)
            case _:
                option = dice.choice([p for p in here.params if p.name not in LEFT_OUT])
                said = dice.choice(option.opts)
                args += [said] if getattr(option, "is_flag", False) else [said, value]
    return json.dumps(args).encode()


def run_options(path: Path, dice: Random) -> bool:
    del dice
    try:
        args = json.loads(path.read_bytes())
    except ValueError:
        return False
    here, within = os.getcwd(), path.parent / "within" / "this"
    within.mkdir(parents=True, exist_ok=True)
    os.chdir(within)
    try:
        given = answered(*(args if isinstance(args, list) and all(isinstance(a, str) for a in args) else ["run"]))
        left = [name for name in os.listdir() if not name.startswith("a.db")]
    finally:
        for name in os.listdir():
            os.unlink(name)
        os.chdir(here)
    if given.code in (2, 3) and left:
        raise LawError(f"{args}: exit {given.code}, and {left} is left behind")
    return given.code in (0, 1)


KINDS = {kind.name: kind for kind in (
    Kind("profile", ".toml", profiles, (damage.toml_of,), read_profile),
    Kind("machine", ".toml", profiles, (damage.machine_of,), run_machine),
    Kind("kernel", ".toml", kernels, (damage.toml_of,), run_kernel),
    Kind("sweep", ".toml", lambda: [text.encode() for text in SWEEPS], (damage.toml_of,), read_sweep),
    Kind("safetensors", ".safetensors", tensors, (damage.safetensors_of,), read_inputs),
    Kind("npz", ".npz", archives, (damage.zip_of,), read_inputs),
    Kind("measurements", ".csv", measurements, (damage.csv_of,), read_calls),
    Kind("nsight", ".csv", lambda: [NSIGHT], (damage.csv_of,), read_calls),
    Kind("validate", ".csv", lambda: [CALL], (damage.csv_of, damage.numbers_of), run_validate),
    Kind("config", ".json", configs, (damage.json_of,), read_config),
    Kind("trace", ".jsonl", lambda: [TRACE], (damage.json_lines_of,), lambda path, _: load_trace(str(path))),
    Kind("arrivals", ".jsonl", lambda: [ARRIVALS], (damage.json_lines_of,), lambda path, _: load_arrivals(str(path))),
    Kind("problem", ".toml", lambda: [PROBLEM], (damage.toml_of,), lambda path, _: load_problem(str(path))),
    Kind("lengths", ".txt", lambda: [b"512, 4096\n1:777  # a comment\n16\n"], (damage.lines_of,),
         lambda path, _: lengths_of(str(path))),
    Kind("mask", ".txt", lambda: [b"1 0 0\n1 1 0\n1 1 1\n", b"10\n11\n"], (damage.lines_of,),
         lambda path, _: load_block_mask(path)),
    Kind("mask of numpy", ".npy", masks, (lambda dice, whole: damage.zip_of(dice, whole) if whole[:2] == b"PK" else
                                          damage.npy(dice, whole[-16:]),), lambda path, _: load_block_mask(path)),
    Kind("result", ".json", results, (damage.json_of,), read_result),
    Kind("rerun", ".json", results, (damage.json_of,), run_result),
    Kind("index", ".json", indices, (damage.json_of,), read_index),
    Kind("store", ".db", stores, (damage.store_of,), read_store),
    Kind("options", ".json", lambda: [b'["run"]'], (options_of,), run_options),
)}  # fmt: skip
