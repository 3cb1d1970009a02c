"""What errors say, as tests compare it: whole."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> str:
    """Return the message of the error of this kind that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)
