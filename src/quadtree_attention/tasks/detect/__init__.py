# SPDX-License-Identifier: Apache-2.0
"""Finding objects: boxes, and masks where the model has them."""
