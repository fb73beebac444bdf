"""Small operations between the matrix products, fused so that every tensor is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.launch import begin_dependent


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, scale, eps, width, x_stride,
    SIZE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program: `total = residual + scale * x` (if ADD), `out = total / rms(total) * weight`."""
    column = tl.arange(0, SIZE)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32) + scale * value
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row * width + column, stored, mask=inside)
        # The norm is of the sum as it is stored, as the next layer will read it.
        value = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * width + column, (value * inverse * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension of `[rows, width]`, fp32 inside."""
    rows, width = x.shape
    out = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    if rows:
        size, dependent = triton.next_power_of_2(width), launch.dependent_launch(x.device)
        _rms_norm_kernel[(rows,)](
            x, x, weight, out, out, 1.0, eps, width, x.stride(0), size, False, dependent,
            num_warps=_warps(size), **launch.launch_options(dependent),
        )  # fmt: skip
    return out


def add_rms_norm(residual: Tensor, x: Tensor, scale: float, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual + scale * x`, `[rows, width]` both, and that sum in `residual`'s memory."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    if rows:
        size, dependent = triton.next_power_of_2(width), launch.dependent_launch(x.device)
        _rms_norm_kernel[(rows,)](
            x, residual, weight, out, residual, scale, eps, width, x.stride(0), size, True, dependent,
            num_warps=_warps(size), **launch.launch_options(dependent),
        )  # fmt: skip
    return out, residual


def _warps(size: int) -> int:
    """Warps so that a thread holds 8 elements or more."""
    return min(16, max(1, size // 512))


@triton.jit
def activate(gate, up, SILU: tl.constexpr):
    """`act(gate) * up` in fp32: SiLU, or GELU with `tanh(u) = 2 sigmoid(2u) - 1`."""
    if SILU:
        return gate * tl.sigmoid(gate) * up
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def _gated_kernel(x, out, width, SIZE: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr):
    """`SIZE` columns of one row a program."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, activate(gate, up, SILU).to(out.dtype.element_ty), mask=inside)


def gated(x: Tensor, silu: bool) -> Tensor:
    """`act(x[:, :F]) * x[:, F:]` for contiguous `x` of `[rows, 2F]`; SiLU, or GELU with tanh."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    if rows:
        size, dependent = min(1024, triton.next_power_of_2(width)), launch.dependent_launch(x.device)
        _gated_kernel[(rows, triton.cdiv(width, size))](
            x, out, width, size, silu, dependent, num_warps=4, **launch.launch_options(dependent)
        )
    return out


@triton.jit
def _finite(x):
    """What the cache may hold: a later owner of the block multiplies what it does not see by 0."""
    return tl.where(tl.abs(x) < 3e38, x, 0.0)


@triton.jit
def _rotate_and_store_kernel(
    qkv, positions, rope, slots, q_norm, k_norm, q_out, cache, eps,
    heads, kv_heads, dim, rotary_half, block_size, block_stride, kv_stride, head_stride,
    TILE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`TILE` heads of one token a program: queries first, then keys, then values. A head is read as the two halves of its rotated
    pairs and, if there is one, the rest."""
    begin_dependent(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_parts, kv_parts = tl.cdiv(heads, TILE), tl.cdiv(kv_heads, TILE)
    is_query = part < q_parts
    is_value = part >= q_parts + kv_parts
    tile = tl.where(is_query, part, tl.where(is_value, part - q_parts - kv_parts, part - q_parts))
    count = tl.where(is_query, heads, kv_heads)
    head = (tile * TILE + tl.arange(0, TILE))[:, None]
    is_head = head < count
    ahead = tl.where(is_query, 0, tl.where(is_value, heads + kv_heads, heads))
    source = qkv + (token * (heads + 2 * kv_heads) + ahead + head) * dim
    slot = tl.load(slots + token).to(tl.int64)
    place = (slot // block_size) * block_stride + head.to(tl.int64) * head_stride + (slot % block_size) * dim
    if is_value:
        column = tl.arange(0, DIM)[None, :]
        inside = is_head & (column < dim)
        value = _finite(tl.load(source + column, mask=inside, other=0.0).to(tl.float32))
        tl.store(cache + place + kv_stride + column, value.to(cache.dtype.element_ty), mask=inside)
    else:
        pair = tl.arange(0, HALF)[None, :]
        in_pair = is_head & (pair < rotary_half)
        first = pair * 2 if INTERLEAVED else pair
        second = first + 1 if INTERLEAVED else pair + rotary_half
        a = tl.load(source + first, mask=in_pair, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=in_pair, other=0.0).to(tl.float32)
        if REST:
            rest = tl.arange(0, DIM)[None, :]
            in_rest = is_head & (rest >= 2 * rotary_half) & (rest < dim)
            c = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
        if NORM:
            weight = q_norm if is_query else k_norm
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if REST:
                squares += tl.sum(c * c, 1)
            inverse = tl.rsqrt(squares / dim + eps)[:, None]
            a = a * inverse * tl.load(weight + first, mask=pair < rotary_half, other=0.0).to(tl.float32)
            b = b * inverse * tl.load(weight + second, mask=pair < rotary_half, other=0.0).to(tl.float32)
            if REST:
                c = c * inverse * tl.load(weight + rest, mask=rest < dim, other=0.0).to(tl.float32)
        angles = rope + tl.load(positions + token).to(tl.int64) * 2 * rotary_half
        cos = tl.load(angles + pair, mask=pair < rotary_half, other=0.0)
        sin = tl.load(angles + rotary_half + pair, mask=pair < rotary_half, other=0.0)
        turned, other = a * cos - b * sin, b * cos + a * sin
        if is_query:
            target = q_out + (token * heads + head) * dim
        else:
            target = cache + place
            turned, other = _finite(turned), _finite(other)
        tl.store(target + first, turned.to(q_out.dtype.element_ty), mask=in_pair)
        tl.store(target + second, other.to(q_out.dtype.element_ty), mask=in_pair)
        if REST:
            c = tl.where(is_query, c, _finite(c))
            tl.store(target + rest, c.to(q_out.dtype.element_ty), mask=in_rest)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    rope: Tensor,
    slots: Tensor,
    kv_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Rotates queries and keys, after a norm of each head if given, writes keys and values to their slots, returns the queries.

    Args:
        qkv: `[T, (H + 2K) * d]`, contiguous.
        positions: `[T]` rows of `rope`.
        rope: `[rows, 2 * pairs]` fp32, cosines then sines.
        slots: `[T]`, `block_id * B + offset`.
        kv_cache: `[num_blocks, 2, K, B, d]` of the same dtype, modified.
        q_norm: `[d]`; with `k_norm`, or both None.
        k_norm: `[d]`.
        eps: of the norms.
        interleaved: pairs are `(2i, 2i + 1)`.

    Returns:
        `[T, H, d]`.
    """
    _, _, kv_heads, block_size, dim = kv_cache.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty(tokens, heads, dim, device=qkv.device, dtype=qkv.dtype)
    half = rope.shape[1] // 2
    if tokens:
        dependent = launch.dependent_launch(qkv.device)
        # As many heads as share a program's angles without leaving lanes idle at the keys.
        tile = min(16, triton.next_power_of_2(kv_heads))
        parts = triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile)
        _rotate_and_store_kernel[(tokens, parts)](
            qkv, positions, rope, slots,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            out, kv_cache, eps, heads, kv_heads, dim, half, block_size, *kv_cache.stride()[:3],
            tile, triton.next_power_of_2(dim), triton.next_power_of_2(half), 2 * half < dim, interleaved, q_norm is not None,
            dependent, num_warps=max(1, min(4, tile * dim // 512)), **launch.launch_options(dependent),
        )  # fmt: skip
    return out
