"""Schedule: what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from iosim.errors import InputError
from iosim.schedule import Schedule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"softmax": "onlin"}, "softmax: 'onlin' is not one of safe, naive, online (did you mean 'online'?)"),
        ({"softmax": 3}, "softmax: 3 is not one of safe, naive, online"),
        ({"splits": 0}, "splits: 0 is out of range; 1 to 1024 is allowed"),
        ({"splits": 1.0}, "splits: 1.0 is not a whole number"),
    ],
)
def test_a_bad_choice_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Schedule(block_q=16, block_k=16, **given)
    assert str(error.value) == message
