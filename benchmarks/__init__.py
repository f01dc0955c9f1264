# SPDX-License-Identifier: Apache-2.0
"""Speed, memory and quality of this package beside baselines; see README.md."""
