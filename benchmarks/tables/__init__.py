# SPDX-License-Identifier: Apache-2.0
"""Tables from result files."""
