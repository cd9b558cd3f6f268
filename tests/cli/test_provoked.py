"""What the world does to a command: full disks, no right to write, signals, clocks, locales, terminals, other systems.

Closed streams and pipes are in test_run.py, killed and interrupted sweeps in test_sweep_sturdy.py.
"""

from __future__ import annotations

import io
import json
import locale
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import pytest

import iosim as package
from iosim.blockmask import load_block_mask
from iosim.cli import cli, main
from iosim.cli.folder import require_replaceable, write_directory
from iosim.cli.output import progress, require_writable
from iosim.errors import OutputError
from iosim.hardware import load_hardware
from iosim.kernels import load_kernel
from iosim.problem import Attention
from iosim.report.book import files
from iosim.report.memory import section as memory_section
from iosim.report.plots import figure, image
from iosim.report.roofline import section as roofline_section
from iosim.study.cases import Runs
from iosim.study.memory import memory
from iosim.study.models import load_model
from iosim.study.ragged import lengths_of
from iosim.study.roofline import roofline
from iosim.study.serving import load_trace
from iosim.study.sweep.grid import read_grids
from iosim.study.validate import nsight
from iosim.study.validate.readers import read
from tests.conftest import Iosim
from tests.fuzz import kinds

ROOT = Path(package.__file__).parents[1]
SMALL = ("run", "-n", "64", "-d", "64", "--no-check")
SWEEP = ("sweep", "-n", "64", "-d", "64", "--vary", "stages=1,2", "--workers", "0")
SHAPE = ("-n", "64", "-d", "64")
MAIN = (
    *((*SMALL, *more) for more in ((), ("--csv",), ("--hw", "mp31", "--hw", "h200-sxm"))),
    *((name, *SHAPE) for name in ("check", "explain", "sensitivity")),
    *(("show", "flash2", *SHAPE), ("hw", "list"), ("hw", "show", "mp31"), ("run", "--help"), ("--help",)),
    *(("report", "memory", "-n", "64"), ("report", "timeline", *SHAPE), ("trace", *SHAPE, "-o", "-")),
)


def process(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "iosim", *args]
    return subprocess.run(call, text=True, encoding="utf-8", capture_output=True, check=False, **more)


def profile(folder: Path, name: str = "mine", **changed: str) -> str:
    """A profile file with other texts in the places of some keys."""
    text = (ROOT / "hw_profiles" / "mp31.toml").read_text("utf-8").replace('name = "mp31"', f'name = "{name}"')
    for key, value in changed.items():
        line = f"{key} = {json.dumps(value)}"
        text = re.sub(rf'(?m)^{key} = ("""(?s:.*?)"""|".*")$', lambda _, line=line: line, text, count=1)
    path = folder / f"{name}.toml"
    path.write_text(text, "utf-8")
    return str(path)


# ---------------------------------------------------------------- disks


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond a few bytes, as on a disk that is full; the store's needs some pages."""
    old, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_what_was_there(iosim: Iosim, tmp_path: Path) -> None:
    out, report = tmp_path / "x.json", tmp_path / "r"
    out.write_text("old")
    report.mkdir()
    (report / "a").write_text("old")
    answer = iosim(*SMALL, "--json", "-o", str(out), "--force")
    assert (answer.code, answer.err) == (3, f"iosim: --output: {out}: File too large\n")
    with pytest.raises(OutputError, match="File too large"):
        write_directory({"a": b"new", "b": bytes(100)}, str(report))
    answer = iosim(*SWEEP, "--store", str(tmp_path / "a.db"))
    assert (answer.code, answer.err.count("\n")) == (3, 1)
    assert f"store: {tmp_path}/a.db: " in answer.err
    assert [out.read_text(), (report / "a").read_text()] == ["old", "old"]
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("a.db")) == ["r", "x.json"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that nobody may write to")
def test_where_nobody_may_write(iosim: Iosim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the work; root, as whom the tests may run, is kept out of /proc too."""
    monkeypatch.setattr("iosim.study.run.compare", lambda *_, **__: pytest.fail("the work was done"))
    for args in (
        *(
            (*SMALL, "-o", "/proc/x.json"),
            ("report", "io", "--plot", "/proc/x.svg"),
            ("report", "all", "-o", "/proc/x"),
        ),
        *((*SWEEP, "--store", "/proc/x.db"), (*SWEEP, "--export", "/proc/x.csv")),
        *(("pareto", "x.db", "--plot", "/proc/x.png"), ("trace", *SHAPE, "-o", "/proc/x/y.json")),
    ):
        answer = iosim(*args)
        assert (answer.code, answer.out, answer.err.count("\n")) == (3, "", 1), (args, answer)
        assert "/proc" in answer.err
    with pytest.raises(OutputError, match="/proc cannot be written to"):
        require_replaceable("/proc/none/such", "report.json", "iosim.report/1", force=True)


# ---------------------------------------------------------------- files that are there already


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        else:
            yield (*path, name), found


def test_every_command_that_writes_a_file_has_force() -> None:
    writing = {"output", "plot", "export"}
    for path, found in commands():
        names = {p.name for p in found.params}
        assert ("force" in names) == bool(names & writing), path


@pytest.mark.parametrize("line", [*(line for line in kinds.LINES if line[0] != "trace"), ("trace", *kinds.SHAPE),
                                  ("measure",), ("calibrate",)], ids=lambda line: " ".join(line)[:24])  # fmt: skip
def test_what_is_no_answer_is_not_overwritten(iosim: Iosim, tmp_path: Path, line: tuple[str, ...]) -> None:
    """Before any work, so in no time; what is given and is not there comes first where it is read first."""
    mine = tmp_path / "mine.toml"
    mine.write_text("my thesis\n")
    answer = iosim(*line, "-o", str(mine))
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == f"iosim: --output: {mine}: is there already, and no answer of iosim's; --force replaces it\n"
    assert mine.read_text() == "my thesis\n"


def test_answers_give_way_to_answers(iosim: Iosim, tmp_path: Path) -> None:
    """JSON and pictures bear a mark; text and CSV do not, and take --force."""
    for args in ((*SMALL, "--json", "-o", "a.json"), ("trace", *SHAPE, "-o", "t.json")):
        path = tmp_path / args[-1]
        path.touch()  # an empty file is nothing that could be lost
        assert [iosim(*args[:-1], str(path)).code for _ in range(2)] == [0, 0]
    for kind in ("png", "svg"):
        path = tmp_path / f"p.{kind}"
        path.write_bytes(image(figure(2.0, 2.0), kind))
        require_writable(str(path))
    for args in ((*SMALL, "-o", "a.txt"), (*SMALL, "--csv", "-o", "a.csv")):
        path = tmp_path / args[-1]
        assert [iosim(*args[:-1], str(path), *more).code for more in ((), (), ("--force",))] == [0, 3, 0]


def test_plots_and_exports_are_kept_too(iosim: Iosim, tmp_path: Path) -> None:
    for name, args in (("x.png", ("report", "memory", "-n", "64", "--plot")), ("x.svg", ("pareto", "no.db", "--plot")),
                       ("x.csv", (*SWEEP, "--store", str(tmp_path / "a.db"), "--export"))):  # fmt: skip
        (tmp_path / name).write_text("mine")
        assert "no answer of iosim's; --force replaces it" in iosim(*args, str(tmp_path / name)).err
        assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "a.db").exists()


# ---------------------------------------------------------------- signals and clocks

SLEEPER = '''"""flash2, after a sleep."""

import time
from pathlib import Path

from iosim.dataflows.flash2 import USES, flash2


def sleeper(attention, schedule):
    Path(__file__).with_name("asleep").touch()
    time.sleep(60)
    return flash2(attention, schedule)
'''


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_the_signal_to_terminate_leaves_nothing_half_written(tmp_path: Path, command: str) -> None:
    flow, out = tmp_path / "sleeper.py", tmp_path / "out.txt"
    flow.write_text(SLEEPER)
    out.write_text("old")
    store = ["--workers", "1", "--store", str(tmp_path / "a.db")]
    rest = ["--no-check", "-o", str(out), "--force"] if command == "run" else store
    call = [sys.executable, "-m", "iosim", command, "-n", "64", "-d", "64", "--dataflow", str(flow), *rest]
    with subprocess.Popen(call, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as running:
        end = time.monotonic() + 60
        while not (tmp_path / "asleep").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        said, err = running.communicate(timeout=30)
    assert (running.returncode, said) == (143, "")
    assert err.splitlines()[-1] == "iosim: terminated"
    assert "Traceback" not in err
    assert out.read_text() == "old"
    kept = {"asleep", "out.txt", "sleeper.py"} | ({"a.db"} if command == "sweep" else set())
    assert {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"} == kept
    if command == "sweep":
        again = process("sweep", "--store", str(tmp_path / "a.db"), cwd=ROOT)
        assert (again.returncode, again.stderr) == (0, "")


def test_a_worker_that_dies_is_said_in_a_line(iosim: Iosim, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system ends one that takes all memory."""

    def dying(*_: object, **__: object) -> None:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(os._exit, 9).result()

    monkeypatch.setattr("iosim.study.run.compare", dying)
    answer = iosim(*SMALL)
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert "a process that works for it died" in answer.err


def test_a_clock_that_jumps_changes_no_duration(iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hour goes back and forth with every look at it; nothing that iosim says depends on it."""
    looks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 * (-1) ** next(looks))
    answer = iosim(*SWEEP, "--store", str(tmp_path / "a.db"), "--json")
    assert answer.code == 0
    text = iosim(*SWEEP[:-2], "--retry", "--workers", "0", "--store", str(tmp_path / "b.db")).out
    took = re.search(r"2 run now in ([\d.]+) (s|ms|us)", text)
    assert took is not None, text
    assert float(took[1]) < 1000


# ---------------------------------------------------------------- locales and terminals


def test_points_stay_points_where_commas_are_usual(
    iosim: Iosim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A system's own German locale where there is one, else what Python is told of it."""
    args = [(*SMALL, "--csv"), (*SMALL, "--json"), SMALL, ("hw", "show", "mp31")]
    before = [iosim(*one).out for one in args]
    old = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
            break
        except locale.Error:
            continue
    told = dict(locale.localeconv()) | {"decimal_point": ",", "thousands_sep": ".", "grouping": [3, 3, 0]}
    monkeypatch.setattr(locale, "localeconv", lambda: told)
    monkeypatch.setattr(locale, "_override_localeconv", told, raising=False)
    try:
        assert [iosim(*one).out for one in args] == before
        by_comma = iosim(*SMALL, "--hw", profile(tmp_path), "--csv").out
        assert by_comma.replace("mine", "mp31") == before[0]
    finally:
        locale.setlocale(locale.LC_ALL, old)


@pytest.mark.parametrize("encoding", [pytest.param("ascii", marks=pytest.mark.slow), "cp1252"])
def test_a_terminal_that_lacks_characters_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    mine = profile(tmp_path, title="Zürich → Ω", notes="é ✓ \u2028")
    good = [(*SMALL, "--hw", mine), ("hw", "show", mine), *(MAIN if encoding == "ascii" else ())]
    for args in (*good, (*SMALL, "--hw", "Ω"), (*SMALL, "--hw", "\udcff.toml")):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setattr(sys, "argv", ["iosim", *args])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out.flush()
        err.flush()
        assert code == (0 if args in good else 2), args
        assert (out if args in good else err).buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=str
)
def test_the_same_in_a_process_with_such_a_terminal(tmp_path: Path, env: dict[str, str]) -> None:
    mine = profile(tmp_path, title="Zürich → Ω")
    for args in ((*SMALL, "--hw", mine), ("hw", "show", mine), ("run", "--help")):
        done = process(*args, env=os.environ | env, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, ""), args
        assert done.stdout.isascii()
    assert "Z\\xfcrich \\u2192 \\u03a9" in process("hw", "show", mine, env=os.environ | env, cwd=ROOT).stdout


def test_a_profile_tells_a_terminal_nothing_but_text(iosim: Iosim, tmp_path: Path) -> None:
    """Neither control characters nor what rich would take for markup."""
    mine = profile(tmp_path, title="[/x] [red]a :smile:", notes="\x1b[31m\x9b2J\x07 is red")
    for args in (("hw", "show", mine), (*SMALL, "--hw", mine), ("hw", "check", mine), (*SMALL, "--hw", mine, "--csv")):
        answer = iosim(*args)
        assert answer.code == 0, answer.err
        assert all(c.isprintable() or c == "\n" for c in answer.out), args
    shown = iosim("hw", "show", mine).out
    assert "[/x] [red]a :smile:" in shown


def test_what_progress_names_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress() as note:
        note("reading [/x] [red].db")  # rich would raise for a tag that is closed and was never open


# ---------------------------------------------------------------- files of other systems

READERS: dict[str, tuple[Callable[[], bytes], Callable[[Path], object]]] = {
    ".toml": (lambda: kinds.profiles()[0], load_hardware),
    "-kernel.toml": (lambda: kinds.kernels()[0], lambda path: load_kernel(str(path)).file),
    "-sweep.toml": (lambda: kinds.SWEEPS[0].encode(), lambda path: read_grids(str(path))),
    "-config.json": (lambda: kinds.configs()[0], lambda path: load_model(str(path)).kinds),
    ".csv": (lambda: kinds.measurements()[0], read),
    "-published.csv": (lambda: kinds.measurements()[3], read),
    "-nsight.csv": (lambda: kinds.NSIGHT, lambda path: read(path, [nsight.shape_record("n=64,d=64")])),
    "-lengths.txt": (lambda: b"512, 4096\n1:777  # a comment\n", lambda path: lengths_of(str(path))),
    "-mask.txt": (lambda: b"1 0\n1 1\n", load_block_mask),
    ".jsonl": (lambda: kinds.TRACE, lambda path: load_trace(str(path))),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["no mark", "byte order mark"])
def test_windows_line_ends_and_marks_change_nothing(tmp_path: Path, name: str, mark: bytes) -> None:
    seed, load = READERS[name]
    path = tmp_path / f"a{name}"
    path.write_bytes(seed())
    plain = load(path)
    path.write_bytes(mark + seed().replace(b"\n", b"\r\n"))
    assert b"\r\n" in path.read_bytes() or name == "-config.json"
    assert load(path) == plain


# ---------------------------------------------------------------- strangers


def test_a_profile_s_names_are_escaped_in_every_file_of_a_report(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script><img src=x onerror="alert(2)">'
    machine = load_hardware(profile(tmp_path, title=evil, notes=f"{evil} ]]> -->", kind=evil))
    assert machine.title == evil
    shape = {"d": 64, "batch": 1, "heads": 1, "dtype": "fp16"}
    points = roofline(Attention(n_q=64, **shape), [machine], ["flash2"], Runs(lambda _: None))
    sections = [memory_section(memory([64], shape, [machine]), {}), roofline_section(points, {"hw": evil})]
    made = files(evil, sections, {"hw": evil})
    assert "&lt;script&gt;alert(1)" in made["index.html"].decode()
    for name, data in made.items():
        if name.endswith((".html", ".svg")):
            assert "<script>alert" not in data.decode(), name
            assert "<img src=x" not in data.decode(), name
    assert r"\<script\>alert" in made["report.md"].decode()
    assert "<script>alert" not in made["report.md"].decode().replace(r"\<", "")


CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}


def test_no_module_unpacks_or_evaluates_what_a_file_says() -> None:
    """Pickles go to a cluster of the user's own, whose scheduler speaks in them anyway, and nowhere else."""
    found = set()
    for path in (ROOT / "iosim").rglob("*.py"):
        text = path.read_text("utf-8")
        modules = re.findall(r"(?m)^\s*(?:import|from) (\w+)", text)
        found |= {(path.name, name) for name in CODE.intersection(modules)}
        found |= {(path.name, name) for name in re.findall(r"(?<![\w.])(eval|exec|compile|__import__)\(", text)}
        found |= {(path.name, call) for call in re.findall(r"np\.load\(.*\)", text) if "allow_pickle=False" not in call}
    assert found == {("cluster.py", "pickle")}


def test_a_file_that_names_code_runs_it_only_when_told(iosim: Iosim, tmp_path: Path) -> None:
    flow = tmp_path / "mine.py"
    source = (ROOT / "iosim" / "dataflows" / "flash2.py").read_text()
    flow.write_text(source.replace("def flash2", f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\n\ndef mine"))
    (tmp_path / "r.json").write_text(iosim(*SMALL, "--dataflow", str(flow), "--json").out)
    (tmp_path / "s.toml").write_text(f'schema = "iosim.sweep/1"\n[[grid]]\nn = 64\nd = 64\ndataflow = "{flow}"\n')
    kernel = (ROOT / "iosim" / "kernels" / "flash2.toml").read_text()
    (tmp_path / "k.toml").write_text(re.sub("(?m)^dataflow = .*$", f'dataflow = "{flow}"', kernel))
    store = str(tmp_path / "a.db")
    (tmp_path / "ran").unlink()
    for args in (("rerun", str(tmp_path / "r.json")), ("sweep", str(tmp_path / "s.toml"), "--store", store)):
        answer = iosim(*args)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert answer.err.endswith("is code; --trust runs it\n")
    assert "a kernel is data, and runs no code" in iosim(*SMALL, "--kernel", str(tmp_path / "k.toml")).err
    assert not (tmp_path / "ran").exists()
    assert iosim("rerun", str(tmp_path / "r.json"), "--trust").code == 0
    assert iosim("sweep", str(tmp_path / "s.toml"), "--trust", "--workers", "0", "--store", store).code == 0
