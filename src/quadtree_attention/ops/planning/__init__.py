# SPDX-License-Identifier: Apache-2.0
"""Cost estimates of calls."""
