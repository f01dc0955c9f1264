# SPDX-License-Identifier: Apache-2.0
"""Random problems for property tests, drawn so that hypothesis can shrink them to readable ones."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.against_reference import Case, case_inputs


@dataclass(frozen=True)
class Drawn(Case):
    """A problem; its tensors follow from the seed."""

    seed: int = 0

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        """Query, key and value, drawn on the CPU."""
        rng = torch.Generator().manual_seed(self.seed)
        shapes = (case_inputs(self)[name] for name in "qkv")
        return tuple(torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes)

    @property
    def query_mask(self) -> torch.Tensor | None:
        return self._mask(self.grid, self.hide_queries, self.seed + 1)

    @property
    def key_mask(self) -> torch.Tensor | None:
        """Leaves at least one key visible in every batch entry."""
        return self._mask(self.key_grid, self.hide_keys, self.seed + 2)

    @property
    def level_weights(self) -> torch.Tensor | None:
        if self.variant == "A":
            return None
        rng = torch.Generator().manual_seed(self.seed + 3)
        return torch.randn(self.num_levels, generator=rng, dtype=torch.float64)

    def options(self, **changes: Any) -> dict[str, Any]:
        names = ("num_levels", "topk", "variant", "level_weights", "query_mask", "key_mask")
        return {name: getattr(self, name) for name in names} | changes

    def _mask(self, grid: tuple[int, ...], hide: float, seed: int) -> torch.Tensor | None:
        if hide == 0:
            return None
        rng = torch.Generator().manual_seed(seed)
        mask = torch.rand(self.batch, *grid, generator=rng) >= hide
        mask.view(self.batch, -1)[:, int(torch.randint(mask[0].numel(), (), generator=rng))] = True
        return mask


LARGEST_SIDE = {1: 24, 2: 9, 3: 4}


@st.composite
def problems(draw: st.DrawFn, *, ndims: tuple[int, ...] = (1, 2, 3), masks: bool = True) -> Drawn:
    ndim = draw(st.sampled_from(ndims))
    sides = st.integers(1, LARGEST_SIDE[ndim])
    grids = st.lists(sides, min_size=ndim, max_size=ndim).filter(lambda g: ndim == 1 or _uneven(g))
    num_levels = draw(st.integers(1, 4 if ndim < 3 else 3))
    hide = st.sampled_from([0.0, 0.3, 0.8]) if masks else st.just(0.0)
    return Drawn(
        name="drawn",
        batch=draw(st.integers(1, 2)),
        grid=tuple(draw(grids)),
        key_grid=tuple(draw(grids)),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 5)),
        value_dim=draw(st.integers(1, 4)),
        num_levels=num_levels,
        topk=tuple(draw(st.integers(1, 7)) for _ in range(num_levels - 1)),
        variant=draw(st.sampled_from(["A", "B"])),
        hide_queries=draw(hide),
        hide_keys=draw(hide),
        seed=draw(st.integers(0, 999)),
    )


def _uneven(grid: list[int]) -> bool:
    return len(set(grid)) > 1
