# SPDX-License-Identifier: Apache-2.0
"""What a call costs, before it is made."""
