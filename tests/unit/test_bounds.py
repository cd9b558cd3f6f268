"""Lower bounds on HBM accesses."""

from __future__ import annotations

import iosim
from iosim.hardware import load_hardware
from iosim.study.bounds import bounds


def test_mp31_crosses_at_d_314() -> None:
    """M = 196,608 B / 2 = 98,304 elements; sqrt(98304) = 313.5, so d = 313 is below M = d^2 and d = 314 above."""
    machine = load_hardware("mp31")
    below, above = (bounds(iosim.Attention(n_q=4096, d=d), machine, 0) for d in (313, 314))
    assert below.m == 98304
    assert below.formula == "N^2 d^2 / M"
    assert above.formula == "N^2 d / sqrt(M)"


def test_the_main_job() -> None:
    """N=4096, d=128, fp16: 4 N d compulsory elements; N^2 d^2 / M = 2^24 * 2^14 / (3 * 2^15) = 2,796,202.7."""
    run = iosim.run(iosim.Attention(n_q=4096, d=128), check=False)
    assert run.bounds.compulsory == 4 * 4096 * 128
    assert run.bounds.theta == 2796202
    assert run.accesses == (2 + 2 * 64) * 4096 * 128  # Q and O once, K and V for each of 64 query tiles


def test_causal_masks_halve_the_bound_but_not_the_inputs() -> None:
    machine = load_hardware("mp31")
    full, causal = (bounds(iosim.Attention(n_q=4096, d=128, causal=c), machine, 2**20) for c in (False, True))
    assert full.compulsory == causal.compulsory == 2**19
    assert causal.theta * 2 - full.theta in range(-2, full.theta // 4096 + 2)
