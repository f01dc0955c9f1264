# SPDX-License-Identifier: Apache-2.0
"""The matcher behind the interfaces of other libraries."""
