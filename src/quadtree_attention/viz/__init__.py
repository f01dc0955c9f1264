# SPDX-License-Identifier: Apache-2.0
"""Pictures of results."""
