# SPDX-License-Identifier: Apache-2.0
"""The paper's numbers: counted by its own rule, and beside ours in docs/paper.md.

`python -m benchmarks paper count` counts; `python -m benchmarks tables` writes the page from
rows.yaml, which has the paper's numbers, and the result files.
"""
