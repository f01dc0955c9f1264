# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def raises(
    error: Any, message: str, call: Callable[..., object], /, *args: Any, **options: Any
) -> None:
    """A call ends with this error, whose message matches."""
    with pytest.raises(error, match=message):
        call(*args, **options)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)
