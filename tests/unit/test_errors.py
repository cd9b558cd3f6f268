"""The family of user errors: exit codes, one printable line, suggestions."""

import subprocess
import sys

import pytest

from iosim.errors import InputError, IosimError, OutputError, nearest


def test_exit_codes_tell_bad_input_from_bad_output() -> None:
    assert (InputError.exit_code, OutputError.exit_code) == (2, 3)
    assert InputError("x").exit_code == 2


@pytest.mark.parametrize("kind", [InputError, OutputError])
def test_one_except_clause_catches_the_family(kind: type[IosimError]) -> None:
    with pytest.raises(IosimError) as caught:
        raise kind("n must be at least 1")
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == "n must be at least 1"


def test_a_message_is_one_printable_line() -> None:
    # a newline, an escape sequence that would colour the terminal, a file name that is not UTF-8
    assert str(InputError("a\nb\x1b[31m\udcff−é")) == r"a\nb\x1b[31m\udcff−é"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("mp32", " (did you mean 'mp31'?)"),
        ("MP31", " (did you mean 'mp31'?)"),
        ("H200", " (did you mean 'h200-sxm'?)"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_nearest_names_a_close_choice_or_nothing(word: str, expected: str) -> None:
    assert nearest(word, ["mp31", "h200-sxm"]) == expected


def test_nearest_takes_an_iterator_and_keeps_the_case_of_the_choice() -> None:
    assert nearest("hbm_Bytes", iter(["HBM_bytes"])) == " (did you mean 'HBM_bytes'?)"


def test_errors_are_light_to_import() -> None:
    code = "import sys, iosim.errors; print([m for m in ('numpy', 'pydantic', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
