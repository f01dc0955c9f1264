# SPDX-License-Identifier: Apache-2.0
"""Suites of time and memory: `python -m benchmarks speed SUITE`; see `benchmarks.suite`."""
