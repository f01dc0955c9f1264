# SPDX-License-Identifier: Apache-2.0
from statistics import fmean

from quadtree_attention.tasks.contract import Column, Scores


class BrightnessMetric:
    def __init__(self, source, classes=None):
        self.rows = []

    def update(self, name, truth, found):
        if found is not None:
            self.rows.append({"name": name, "error": abs(found.value - truth)})

    def state(self):
        return self.rows

    def merge(self, states):
        self.rows = [row for rows in states for row in rows]

    def compute(self):
        columns = Column("name", "image", None), Column("error", "error")
        return Scores("toy", {"error": fmean(r["error"] for r in self.rows)}, self.rows, columns)
