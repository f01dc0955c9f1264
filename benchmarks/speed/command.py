# SPDX-License-Identifier: Apache-2.0
"""One prediction in a process that imports what a command imports."""

import json
import re
import time
from pathlib import Path

from quadtree_attention import tasks


def predict(name: str, images: list[str]) -> None:
    """Print milliseconds of a prediction in this process, and the peak memory of the process."""
    predictor = getattr(tasks, name).from_pretrained()
    begin = time.perf_counter()
    predictor(*images)
    milliseconds = (time.perf_counter() - begin) * 1e3
    # Not `ru_maxrss`, which is at least the memory of the process that started this one
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps([milliseconds, int(peak) / 1024]))
