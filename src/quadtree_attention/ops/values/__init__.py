# SPDX-License-Identifier: Apache-2.0
"""The learned value pyramid."""
