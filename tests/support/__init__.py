# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests."""

from collections.abc import Callable
from typing import Any

import pytest


def raises(
    error: Any, message: str, call: Callable[..., object], /, *args: Any, **options: Any
) -> None:
    """A call ends with this error, whose message matches."""
    with pytest.raises(error, match=message):
        call(*args, **options)
