# SPDX-License-Identifier: Apache-2.0
from statistics import fmean

from quadtree_attention.tasks.contract import Column, Metric, Scores


class ToyMetric(Metric):
    def update(self, name, truth, found):
        if found is not None:
            self.rows.append({"name": name, "error": abs(found.value - truth)})

    def compute(self):
        columns = Column("name", "image", None), Column("error", "error")
        return Scores("toy", {"error": fmean(r["error"] for r in self.rows)}, self.rows, columns)
