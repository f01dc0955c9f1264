# SPDX-License-Identifier: Apache-2.0
"""One prediction in a process that imports what a command imports."""

import json
import resource
import time

from quadtree_attention import tasks


def predict(name: str, images: list[str]) -> None:
    """Print milliseconds of a prediction in this process, and the peak memory of the process."""
    predictor = getattr(tasks, name).from_pretrained()
    begin = time.perf_counter()
    predictor(*images)
    milliseconds = (time.perf_counter() - begin) * 1e3
    print(json.dumps([milliseconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
