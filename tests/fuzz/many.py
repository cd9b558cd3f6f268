"""Many tries of one kind in this process: python -m tests.fuzz.many KIND FIRST COUNT; one line, and one a fault."""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import iosim.cli.output
from tests.fuzz.kinds import KINDS, LawError, attempt


def main(name: str, first: int, count: int) -> None:
    """Print how many were tried, taken and refused, and how many faults there were, each place of one once."""
    iosim.cli.output.PATIENCE = 3600
    out = os.fdopen(os.dup(1), "w")  # a command whose reader has gone lets this process's own output go
    kind, came, faults = KINDS[name], Counter[bool](), dict[str, list[str]]()
    kind.seeds()
    with TemporaryDirectory() as folder:
        for number in range(first, first + count):
            try:
                came[attempt(kind, number, Path(folder))] += 1
            except LawError as error:
                faults.setdefault(_place(error), []).append(str(error))
    print(f"{name.replace(' ', '-')}: {count} tries, {came[True]} taken, {came[False]} refused, "
          f"{sum(map(len, faults.values()))} faults", file=out)  # fmt: skip
    for place, found in faults.items():
        print(f"  {len(found)} at {place}: {found[0]}", file=out)
    out.close()


def _place(error: LawError) -> str:
    """Where in iosim it came from."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    own = [frame for frame in frames if "/iosim/" in frame.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "the law"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
