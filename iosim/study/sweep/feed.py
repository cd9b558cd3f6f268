"""What is still to be done, in batches long enough that sending them costs nothing to speak of."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from iosim.study.sweep.grid import Configuration
from iosim.study.sweep.store import Answer
from iosim.study.sweep.work import Batch

BATCH_SECONDS = 0.5  # of work: a thousand times what sending a batch takes
MOST_IN_BATCH = 256
TOGETHER = 8  # neighbours, which share programs and traffic, stay together


@dataclass(frozen=True, slots=True)
class Done:
    """A batch and its answers; None where the process that had it died."""

    batch: Batch
    answers: tuple[Answer, ...] | None


class Feed:
    """Hands out configurations; `missing` says which keys are still not in the store, where others write too.

    Each sweep has an order of its own, so that two on one store seldom do the same, and the time left can be told from
    what is done.
    """

    def __init__(self, todo: Sequence[Configuration], missing: Callable[[Sequence[str]], Collection[str]]) -> None:
        parts = [todo[n : n + TOGETHER] for n in range(0, len(todo), TOGETHER)]
        random.Random().shuffle(parts)  # noqa: S311 - no secret
        self.left = [c for part in parts for c in part]
        self.single: list[Configuration] = []
        self.missing = missing
        self.workers = 1
        self.batch_seconds = BATCH_SECONDS
        self.seconds, self.timed = 0.0, 0
        self.elsewhere = 0

    def take(self) -> Batch | None:
        """The next batch, or None where nothing is left."""
        while self.single or self.left:
            if self.single:
                taken = [self.single.pop()]
            else:
                size = self._size()
                taken = self.left[-size:]
                del self.left[-size:]
            wanted = set(self.missing([c.key for c in taken]))
            self.elsewhere += len(taken) - len(wanted)
            if wanted:
                return Batch.of([c for c in taken if c.key in wanted])
        return None

    def took(self, batch: Batch, seconds: float) -> None:
        """A batch has taken so long."""
        self.seconds += seconds
        self.timed += len(batch.configurations)

    def one_by_one(self, batch: Batch) -> None:
        """Hand out what is in a batch once more, each alone."""
        self.single.extend(batch.configurations)

    def _size(self) -> int:
        if not self.timed:
            return 1
        fitting = int(self.batch_seconds * self.timed / max(self.seconds, 1e-9))
        fair = -(-len(self.left) // (2 * self.workers))  # the last batches shrink, so that workers end together
        return max(1, min(fitting, fair, MOST_IN_BATCH))
