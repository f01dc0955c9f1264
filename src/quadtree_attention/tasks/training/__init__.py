# SPDX-License-Identifier: Apache-2.0
"""Training, shared by all tasks."""
