"""Small operations between the matrix products, fused so that every tensor is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch


@triton.jit
def _begin(PDL: tl.constexpr):
    """With a dependent launch: lets the next kernel begin, and waits for the end of those before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, scale, eps, width, x_stride,
    SIZE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program: `total = residual + scale * x` (if ADD), `out = total / rms(total) * weight`."""
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32) + scale * value
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row * width + column, stored, mask=inside)
        # The norm is of the sum as it is stored, as the next layer will read it.
        value = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
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
def _gated_kernel(x, out, width, SIZE: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr):
    """`SIZE` columns of one row a program."""
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        act = gate * tl.sigmoid(gate)
    else:
        # gelu with tanh, and tanh(u) = 2 sigmoid(2u) - 1.
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * width + column, (act * up).to(out.dtype.element_ty), mask=inside)


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
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token a program. A head is read as the two halves of its rotated pairs and the rest."""
    _begin(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + token * (heads + 2 * kv_heads) * dim + head * dim
    slot = tl.load(slots + token).to(tl.int64)
    is_query = head < heads
    kv_head = tl.where(head < heads + kv_heads, head - heads, head - heads - kv_heads)
    place = (slot // block_size) * block_stride + kv_head.to(tl.int64) * head_stride + (slot % block_size) * dim
    if head >= heads + kv_heads:
        column = tl.arange(0, DIM)
        value = _finite(tl.load(source + column, mask=column < dim, other=0.0).to(tl.float32)).to(
            cache.dtype.element_ty
        )
        tl.store(cache + place + kv_stride + column, value, mask=column < dim)
    else:
        pair = tl.arange(0, HALF)
        in_pair = pair < rotary_half
        first = pair * 2 if INTERLEAVED else pair
        second = first + 1 if INTERLEAVED else pair + rotary_half
        rest = tl.arange(0, DIM)
        in_rest = (rest >= 2 * rotary_half) & (rest < dim)
        a = tl.load(source + first, mask=in_pair, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=in_pair, other=0.0).to(tl.float32)
        c = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
        if NORM:
            weight = q_norm if is_query else k_norm
            squares = tl.sum(a * a, 0) + tl.sum(b * b, 0) + tl.sum(c * c, 0)
            inverse = tl.rsqrt(squares / dim + eps)
            a = a * inverse * tl.load(weight + first, mask=in_pair, other=0.0).to(tl.float32)
            b = b * inverse * tl.load(weight + second, mask=in_pair, other=0.0).to(tl.float32)
            c = c * inverse * tl.load(weight + rest, mask=in_rest, other=0.0).to(tl.float32)
        angles = rope + tl.load(positions + token).to(tl.int64) * 2 * rotary_half
        cos = tl.load(angles + pair, mask=in_pair, other=0.0)
        sin = tl.load(angles + rotary_half + pair, mask=in_pair, other=0.0)
        target = q_out + token * heads * dim + head * dim if is_query else cache + place
        turned, other = a * cos - b * sin, b * cos + a * sin
        if not is_query:
            turned, other, c = _finite(turned), _finite(other), _finite(c)
        tl.store(target + first, turned.to(q_out.dtype.element_ty), mask=in_pair)
        tl.store(target + second, other.to(q_out.dtype.element_ty), mask=in_pair)
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
        _rotate_and_store_kernel[(tokens, heads + 2 * kv_heads)](
            qkv, positions, rope, slots,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            out, kv_cache, eps, heads, kv_heads, dim, half, block_size, *kv_cache.stride()[:3],
            triton.next_power_of_2(dim), triton.next_power_of_2(half), interleaved, q_norm is not None, dependent,
            num_warps=1, **launch.launch_options(dependent),
        )  # fmt: skip
    return out
