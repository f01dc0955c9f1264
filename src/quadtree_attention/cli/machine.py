# SPDX-License-Identifier: Apache-2.0
"""What this machine has, for `quadtree info` and benchmarks; needs no other package."""

import platform
import re
from importlib import metadata
from pathlib import Path


def cpu_name() -> str:
    """The model of the CPU, or its architecture."""
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:  # not Linux
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
