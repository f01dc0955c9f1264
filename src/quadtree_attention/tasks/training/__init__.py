# SPDX-License-Identifier: Apache-2.0
"""The training engine all tasks share."""
