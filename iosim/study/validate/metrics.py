"""Errors of predictions, as percentages, and what a tile sweep is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median


def error_pct(predicted: float, measured: float) -> float:
    """Signed error in percent of what was measured; where that is 0, any other prediction is 100 % off."""
    if measured == 0:
        return 0.0 if predicted == 0 else 100.0
    return 100 * (predicted / measured - 1)


def mape(errors: Sequence[float]) -> float:
    """Mean absolute percentage error."""
    return fmean(map(abs, errors))


def median_ape(errors: Sequence[float]) -> float:
    """Median absolute percentage error."""
    return median(map(abs, errors))


def worst_ape(errors: Sequence[float]) -> float:
    """Largest absolute percentage error."""
    return max(map(abs, errors))


def bias(errors: Sequence[float]) -> float:
    """Mean signed percentage error."""
    return fmean(errors)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, equal values sharing their mean rank.

    None where one of the two is constant or shorter than two.
    """
    x, y = _ranks(a), _ranks(b)
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    middle = (len(x) + 1) / 2
    x, y = [r - middle for r in x], [r - middle for r in y]
    return sum(p * q for p, q in zip(x, y, strict=True)) / sqrt(sum(p * p for p in x) * sum(q * q for q in y))


def regret_pct(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower than the best choice the one is that was predicted to be best, in percent.

    Where several are predicted to be best, the slowest of them counts.
    """
    best = min(predicted)
    taken = max(m for p, m in zip(predicted, measured, strict=True) if p == best)
    return 100 * (taken / min(measured) - 1)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in order[start:end]:
            ranks[position] = (start + 1 + end) / 2
        start = end
    return ranks
