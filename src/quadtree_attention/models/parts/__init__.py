# SPDX-License-Identifier: Apache-2.0
"""What the networks are put together from."""
