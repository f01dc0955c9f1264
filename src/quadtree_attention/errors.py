# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by this package.

Each class also derives from the corresponding built-in exception
(`ShapeError` is a `ValueError`, `DTypeError` a `TypeError`, ...).
"""

from collections.abc import Iterable


class QuadtreeAttentionError(Exception):
    """Base of all errors raised by quadtree_attention."""


class ShapeError(QuadtreeAttentionError, ValueError):
    """A tensor has the wrong rank, size or grid."""


class DTypeError(QuadtreeAttentionError, TypeError):
    """A tensor has the wrong or an inconsistent dtype or device."""


class OptionError(QuadtreeAttentionError, ValueError):
    """An option has a value that is not accepted."""


class BackendUnsupportedError(QuadtreeAttentionError, RuntimeError):
    """The requested backend cannot run this problem; `reasons` lists the reasons."""

    def __init__(self, message: str, reasons: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.reasons = list(reasons)


class CheckpointError(QuadtreeAttentionError, RuntimeError):
    """A checkpoint does not fit the model it is loaded into."""


class DataError(QuadtreeAttentionError, ValueError):
    """A file of a data set is missing, unreadable or invalid."""


class ExportError(QuadtreeAttentionError, RuntimeError):
    """A network cannot be exported, or the exported file disagrees with PyTorch."""


class MissingDependencyError(QuadtreeAttentionError, ImportError):
    """An optional dependency is not installed; the message contains the extra to install."""
