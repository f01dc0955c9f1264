# SPDX-License-Identifier: Apache-2.0
"""What could not be used of a data set, in words."""

from collections.abc import Sequence

SHOWN = 5  # reasons that are told


def summary(reasons: Sequence[str]) -> str:
    """The first reasons, and how many more there are."""
    more = f", and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return "; ".join(reasons[:SHOWN]) + more
