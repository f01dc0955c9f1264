# SPDX-License-Identifier: Apache-2.0
"""Estimates of FLOPs, memory and time of a call."""
