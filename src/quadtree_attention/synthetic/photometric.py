# SPDX-License-Identifier: Apache-2.0
"""Photometric distortions: exposure, colour cast, blur, vignetting, noise, compression."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.errors import ShapeError
from quadtree_attention.synthetic.cameras import pixel_grid
from quadtree_attention.synthetic.draws import Draws, hash_noise
from quadtree_attention.synthetic.fused import fused, send
from quadtree_attention.synthetic.options import check_number

REACH = 4  # radius of the blur kernels in pixels
BLOCK = 8  # block size of JPEG
# A plane close to the luminance table of the JPEG standard: coarser steps for finer detail
STEPS = 10 + 6.0 * (torch.arange(BLOCK)[:, None] + torch.arange(BLOCK))


def distort(
    image: Tensor,
    indices: Sequence[int],
    *,
    seed: int = 0,
    view: int = 0,
    strength: float = 1.0,
    jpeg: float = 0.3,
) -> Tensor:
    """Apply random photometric distortions to images.

    Args:
        image: (B, 3, H, W) between 0 and 1.
        indices: B indices of the items; distortions are determined by (seed, index, view).
        seed: Seed of the data set.
        view: Index of the view; views are distorted independently.
        strength: 0 leaves images unchanged, 1 is typical of cheap cameras, 2 is the maximum.
        jpeg: Share of images with compression artefacts, at strength 1.

    Returns:
        (B, 3, H, W) between 0 and 1.

    Raises:
        ShapeError: The image has another shape.
        OptionError: An option is out of range.

    Example:
        >>> distort(torch.rand(2, 3, 24, 32), [0, 1], strength=0.5).shape
        torch.Size([2, 3, 24, 32])
    """
    check_number("strength", strength, 0, 2)
    check_number("jpeg", jpeg, 0, 1)
    if image.ndim != 4 or image.shape[:2] != (len(indices), 3):
        raise ShapeError(
            f"images to distort must be ({len(indices)}, 3, H, W), as many as indices, got "
            f"{tuple(image.shape)}"
        )
    if strength == 0:
        return image
    draws = Draws(seed, indices, stream=100 + view)
    # Autocast of a training loop would compute in bfloat16
    with torch.autocast(image.device.type, enabled=False):
        kernels = _blur_kernels(draws, strength)
        numbers = torch.cat(
            [
                kernels.flatten(1),
                _vignette_numbers(draws, image, strength),
                _tone_numbers(draws, strength),
                _noise_numbers(draws, strength),
            ],
            dim=1,
        )
        keys = send(draws.keys(), image.device)
        numbers = send(numbers.to(image.dtype), image.device)
        size = kernels[0].numel()
        image = blur(image, numbers[:, :size].reshape(kernels.shape))
        image = _develop(image, numbers[:, size:].contiguous(), keys)
        return _compress(image, draws, strength, jpeg * min(strength, 1.0))


def _blur_kernels(draws: Draws, strength: float) -> Tensor:
    """Draw blur kernels (B, k, k): defocus, motion, both or, often, nearly none."""
    offset = torch.arange(-REACH, REACH + 1, dtype=torch.float64)
    y, x = torch.meshgrid(offset, offset, indexing="ij")
    sigma = torch.where(draws.chance(0.5), draws.uniform(0.4, 0.4 + 1.1 * strength), 0.3)
    length = torch.where(draws.chance(0.25), draws.uniform(0, min(3 * strength, REACH - 1)), 0.0)
    angle = draws.uniform(0, math.pi)
    steps = torch.linspace(-1, 1, 9).double()  # nine positions of a moving point
    move = (length[:, None] * steps)[..., None, None]  # (B, 9, 1, 1)
    angle, sigma = angle[:, None, None, None], sigma[:, None, None, None]
    dx, dy = x - move * angle.cos(), y - move * angle.sin()
    kernel = torch.exp(-(dx**2 + dy**2) / (2 * sigma**2)).sum(dim=1)
    return kernel / kernel.sum(dim=(1, 2), keepdim=True)


def blur(image: Tensor, kernels: Tensor) -> Tensor:
    """Convolve images (B, C, H, W) with one odd kernel each (B, k, k), replicating edges."""
    batch, channels = image.shape[:2]
    reach = kernels.shape[-1] // 2
    weight = kernels.to(image).repeat_interleave(channels, 0)[:, None]  # (B * C, 1, k, k)
    padded = F.pad(image, (reach,) * 4, mode="replicate").flatten(0, 1)[None]
    return F.conv2d(padded, weight, groups=batch * channels)[0].unflatten(0, (batch, channels))


def _vignette_numbers(draws: Draws, image: Tensor, strength: float) -> Tensor:
    """Draw (B, 3): centre and strength of the vignette."""
    middle = _middle(image)
    centre = torch.tensor(middle) * (1 + draws.uniform(-0.15, 0.15, 2))
    amount = torch.where(draws.chance(0.5), draws.uniform(0, 0.4 * strength), 0.0)
    return torch.cat([centre, amount[:, None]], dim=1)


def _middle(image: Tensor) -> tuple[float, float]:
    return image.shape[3] / 2, image.shape[2] / 2


def _tone_numbers(draws: Draws, strength: float) -> Tensor:
    """Draw (B, 7): exposure of three colours, gamma, desaturation, contrast, offset."""
    exposure = torch.exp2(draws.uniform(-0.6, 0.6) * strength)
    colour = torch.exp2(draws.uniform(-0.12, 0.12, 3) * strength)
    gamma = torch.exp2(draws.uniform(-0.4, 0.4) * strength)
    contrast = torch.exp2(draws.uniform(-0.4, 0.25) * strength)
    lift = 0.5 + draws.uniform(-0.06, 0.06) * strength
    grey = torch.where(draws.chance(0.1), 1.0, draws.uniform(0, 0.3) * strength).clamp(max=1)
    others = torch.stack([gamma, grey, contrast, lift], dim=1)
    return torch.cat([exposure[:, None] * colour, others], dim=1)


def _noise_numbers(draws: Draws, strength: float) -> Tensor:
    """Draw (B, 2): variance of the read noise, and of the shot noise per unit of brightness."""
    read = draws.uniform(0, 0.015) * strength
    shot = draws.uniform(0, 0.0012) * strength**2
    return torch.stack([read**2, shot], dim=1)


@fused(batched=3)
def _develop(image: Tensor, numbers: Tensor, keys: Tensor) -> Tensor:
    """Apply the distortions per pixel: vignetting, tones, noise."""
    columns = numbers[..., None, None]  # (B, 12, 1, 1)
    image = image * _vignette(image, columns[:, :2, 0, 0], columns[:, 2])[:, None]
    image = (image * columns[:, 3:6]).clamp(1e-4, 1)
    image = image.pow(columns[:, 6:7])
    image = torch.lerp(image, image.mean(dim=1, keepdim=True), columns[:, 7:8])
    image = (image - 0.5) * columns[:, 8:9] + columns[:, 9:10]
    image = image.clamp(0, 1)
    variance = image * columns[:, 11:12] + columns[:, 10:11]
    noise = hash_noise(keys, *image.shape[1:]).to(image.dtype)
    return (image + variance.sqrt() * noise).clamp(0, 1)


def _vignette(image: Tensor, centre: Tensor, amount: Tensor) -> Tensor:
    """Return the transmittance (B, H, W)."""
    away = pixel_grid(image.shape[2], image.shape[3], image) - centre[:, None, None]
    away = away / math.hypot(*_middle(image))
    return (1 - amount * (away * away).sum(dim=-1)).clamp(min=0)


def _compress(image: Tensor, draws: Draws, strength: float, share: float) -> Tensor:
    """Quantise the cosine transform of 8 x 8 blocks, as JPEG does."""
    chosen = draws.chance(share)
    coarse = draws.uniform(0.2, 0.2 + strength)
    if not chosen.any():
        return image
    # Process the chosen images only; their indices are on the CPU, so nothing synchronises
    rows = send(chosen.nonzero()[:, 0], image.device)
    part = image[rows]
    height, width = part.shape[2:]
    padded = F.pad(part, (0, -width % BLOCK, 0, -height % BLOCK), mode="replicate")
    blocks = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(3, 4)
    basis, steps = send(torch.stack([_cosines(), STEPS / 255]).to(image.dtype), image.device)
    coarse = send(coarse[chosen].to(image.dtype), image.device)
    step = steps * coarse.reshape(-1, 1, 1, 1, 1, 1)
    waves = basis @ blocks @ basis.t()  # (n, 3, rows, columns, 8, 8)
    blocks = basis.t() @ ((waves / step).round_() * step) @ basis
    part = blocks.transpose(3, 4).flatten(4, 5).flatten(2, 3)[..., :height, :width]
    return image.index_copy(0, rows, part.clamp(0, 1))


def _cosines() -> Tensor:
    """Return the 8 x 8 matrix of the cosine transform, with orthonormal rows."""
    wave, place = torch.arange(BLOCK)[:, None], torch.arange(BLOCK) + 0.5
    basis = (wave * place * (math.pi / BLOCK)).cos() * math.sqrt(2 / BLOCK)
    basis[0] /= math.sqrt(2)
    return basis
