"""Tensors as few bytes, and back. Pure functions of tensors: no group, no state.

A :class:`Codec` turns a 1-D floating tensor of known numel into a known number of bytes:

=================  =======================  ===========================================================
codec              bytes per float32 value  largest error of one value
=================  =======================  ===========================================================
NoCompression      4                        none
Float16            2                        2^-11 of the value; beyond 65504 it becomes infinite
BFloat16           2                        2^-8 of the value
MinMaxUInt8        1                        1/510 of the difference between the tensor's max and min
BlockInt8          1.004                    1/254 of the largest absolute value in its block of 1024
BlockInt4          0.504                    1/14 of the largest absolute value in its block of 1024
=================  =======================  ===========================================================

What holds for all of them:

- Finite values decode to finite values (Float16: up to 65504; BFloat16: up to 1 - 2^-8 of the type's largest).
  Where a value is infinite or NaN, all values that share a scale with it decode to infinities or NaNs, never to
  wrong finite numbers: a gradient scaler sees it.
- The same bytes decode to the same values on every machine, so that replicas stay equal. For this reason
  products and sums are separate operations: fused, they would round differently on another processor.
- The code is the same for CPU and CUDA, and never makes the host wait for the GPU.

On the CPU a tensor is worked on in pieces that stay in a core's cache, in one small buffer: operations on the
whole tensor would carry every intermediate result to main memory and back, which takes several times as long.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["BFloat16", "BlockInt4", "BlockInt8", "Codec", "Float16", "MinMaxUInt8", "NoCompression"]

ALIGNMENT = 8  # bytes
PIECE_NUMEL = (
    2**20
)  # a few MB: stay in the cache that a core has to itself or shares, and outlast the start of an operation


class Codec(ABC):
    """How the values of a 1-D tensor become bytes. Codecs are small, immutable and picklable."""

    @abstractmethod
    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return how many bytes a tensor takes.

        Args:
            numel: number of values; may be 0.
            dtype: of the values.

        Returns:
            A multiple of 8, so that encoded tensors laid one behind the other stay aligned.

        Raises:
            TypeError: ``dtype`` is not float16, bfloat16, float32 or float64.
        """

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor, *, overwrite: bool = False) -> None:
        """Write ``values`` as bytes.

        Args:
            values: 1-D, contiguous, floating; may be empty.
            out: 1-D uint8, contiguous, of exactly ``encoded_bytes``, aligned to 8 bytes. Every byte of it is
                written.
            overwrite: whether ``values`` may be left with any content, which saves a buffer to work in.
        """

    def round_(self, values: Tensor, out: Tensor) -> None:
        """Write ``values`` as bytes, and what :meth:`decode` will make of these in their place.

        Args:
            values: as for :meth:`encode`; changed in place.
            out: as for :meth:`encode`.
        """
        self.encode(values, out, overwrite=True)
        self.decode(out, values)

    @abstractmethod
    def decode(self, codes: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """Set ``out`` to ``beta`` times itself and ``alpha`` times the decoded values.

        Args:
            codes: what :meth:`encode` wrote for a tensor with the numel and dtype of ``out``.
            out: 1-D, contiguous; changed in place.
            alpha: factor.
            beta: factor of what ``out`` holds; with 0, it need not hold anything. So the mean of many tensors needs no
                second full-size tensor, and no pass of its own. With others than 0 and 1 the last bit may depend on
                the processor: for means that one rank makes and sends to the others.
        """


@dataclass(frozen=True)
class NoCompression(Codec):
    """The values as they are."""

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """All bytes of the values."""
        _work_dtype(dtype)
        return _aligned(numel * dtype.itemsize)

    def encode(self, values: Tensor, out: Tensor, *, overwrite: bool = False) -> None:
        """Copy."""
        _encode_as(values.dtype, values, out)

    def decode(self, codes: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """Copy, or multiply and add."""
        _decode_as(out.dtype, codes, out, alpha, beta)


@dataclass(frozen=True)
class _Half(Codec):
    """The nearest number of a type with 16 bits."""

    half: ClassVar[torch.dtype]

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Two per value."""
        _work_dtype(dtype)
        return _aligned(2 * numel)

    def encode(self, values: Tensor, out: Tensor, *, overwrite: bool = False) -> None:
        """Round to the nearest."""
        _encode_as(self.half, values, out)

    def decode(self, codes: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """Widen, multiply and add."""
        _decode_as(self.half, codes, out, alpha, beta)


@dataclass(frozen=True)
class Float16(_Half):
    """IEEE half precision: 11 significant bits. Values beyond 65504 become infinite, below 3e-8 zero."""

    half = torch.float16


@dataclass(frozen=True)
class BFloat16(_Half):
    """The upper half of a float32: 8 significant bits; the last 1/256 of its range may become infinite."""

    half = torch.bfloat16


@dataclass(frozen=True)
class _Blocked(Codec):
    """Blocks of consecutive values, each with scales of its own. Layout: the scales of all blocks, then the codes."""

    block: int = 1024
    scales_per_block: ClassVar[int] = 1
    codes_per_byte: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block must be a whole number of values, at least 1, got {self.block}")

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The codes, and the scales of every block."""
        num_blocks, rest = divmod(numel, self.block)
        num_codes = num_blocks * self._code_bytes(self.block) + self._code_bytes(rest)
        num_scales = (num_blocks + (rest > 0)) * self.scales_per_block
        return _aligned(num_scales * _work_dtype(dtype).itemsize + num_codes)

    def _rows(
        self, values: Tensor, buffer: Tensor, dtype: torch.dtype, in_place: bool = False
    ) -> tuple[Tensor, "list[tuple[Tensor, Tensor, slice, Tensor]]"]:
        """Cut values and codes in pieces, a row per block; a shorter last block alone.

        Returns:
            The scales of all blocks, [scales_per_block, blocks, 1], and for every piece its values, its codes, its
            place among the scales, and room to work in, which all pieces share: the values' own memory if that can be.
        """
        num_blocks, rest = divmod(values.numel(), self.block)
        scales, codes = _sections(buffer, (num_blocks + (rest > 0)) * self.scales_per_block, dtype)
        rows = max(1, _piece_numel(values) // self.block)
        shapes = [(first, min(rows, num_blocks - first), self.block) for first in range(0, num_blocks, rows)]
        if rest:
            shapes.append((num_blocks, 1, rest))
        in_place = in_place and values.dtype == dtype
        work = values
        if not in_place:
            work = values.new_empty(max((n * width for _, n, width in shapes), default=0), dtype=dtype)
        pieces = []
        for first, n, width in shapes:
            start, row_bytes = first * self._code_bytes(self.block), self._code_bytes(width)
            piece = values[first * self.block : first * self.block + n * width].view(n, width)
            piece_codes = codes[start : start + n * row_bytes].view(n, row_bytes)
            room = piece if in_place else work[: n * width].view(n, width)
            pieces.append((piece, piece_codes, slice(first, first + n), room))
        return scales.view(self.scales_per_block, -1, 1), pieces

    def _code_bytes(self, numel: int) -> int:
        return -(-numel // self.codes_per_byte)


@dataclass(frozen=True)
class MinMaxUInt8(_Blocked):
    """Each value goes to the nearest of 256 levels, equally spaced between the smallest and largest of its block.

    With lo and hi the smallest and the largest value of a block::

        level = (hi - lo) / 255,   q = round((v - lo) / level) in 0..255,   v' = lo + q * level

    The same is written around the middle, where no step can overflow, and with signed codes c = q - 128, since torch
    converts floats to int8 about nine times as fast as to uint8::

        c = round((v - centre) / level) in -128..127,   v' = centre + c * level,   centre = (lo + hi + level) / 2

    Layout: the centres of all blocks, their levels (float32; float64 for float64 values), c as one byte per value. A
    block of equal values has level 0 and comes back exactly. If a value is not finite, neither is the level of its
    block, and so no decoded value of the block is.

    Source: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021, arXiv:2107.01499.
    Differs from Bagua: Bagua rounds v * 255 / (hi - lo + 1e-7), which is too coarse for ranges around 1e-7 and below,
    and inexact where the range is small beside the values. And it has one range per chunk: where a chunk spans layers,
    one layer's large gradients then round another's small ones to nothing.

    Args:
        block: values per block, at least 1. The default adds 0.2 % to the bytes (float64: 0.4 %).

    Raises:
        ValueError: ``block`` is not a positive whole number.
    """

    block: int = 4096
    scales_per_block = 2

    def encode(self, values: Tensor, out: Tensor, *, overwrite: bool = False) -> None:
        """Two passes: find the ranges of all blocks, then write the codes."""
        self._encode(values, out, overwrite, rounded=False)

    def round_(self, values: Tensor, out: Tensor) -> None:
        """Two passes: the codes are decoded before they are bytes."""
        self._encode(values, out, overwrite=True, rounded=True)

    def decode(self, codes: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """One pass."""
        scales, pieces = self._rows(out, codes, _work_dtype(out.dtype), in_place=not beta)
        centre, level = (scales if alpha == 1.0 else scales * alpha).unbind(0)
        for piece, piece_codes, place, work in pieces:
            _store(work.copy_(piece_codes).mul_(level[place]).add_(centre[place]), piece, beta)

    def _encode(self, values: Tensor, out: Tensor, overwrite: bool, rounded: bool) -> None:
        dtype = _work_dtype(values.dtype)
        limits = torch.finfo(dtype)
        out[-ALIGNMENT:].zero_()  # padding
        scales, pieces = self._rows(values, out, dtype, in_place=overwrite)
        low, high = values.new_empty(scales.shape).unbind(0)
        for piece, _, place, _ in pieces:
            # Two reductions over the cached piece: a single aminmax is not vectorised, and slower.
            torch.amin(piece, 1, keepdim=True, out=low[place])
            torch.amax(piece, 1, keepdim=True, out=high[place])
        low, high = low.to(dtype), high.to(dtype)
        # As few operations as will do: on so few values, starting one takes longer than its work.
        centre, level = scales.unbind(0)
        half = (high * 0.5).sub_(low, alpha=0.5)
        # A hair more than 127.5, so that no decoded value is rounded beyond the largest float. The smallest normal
        # number still has a finite reciprocal, and 128 times the largest level does not overflow.
        torch.mul(half, 1 / 127.5001, out=level).clamp_(min=limits.tiny, max=limits.max / 128.001)
        factor = level.reciprocal()
        level.mul_(half.sign()).add_(half, alpha=0.0)  # 0 for equal values, NaN where half is not finite
        torch.add(low, half, out=centre).add_(level, alpha=0.5)
        for piece, codes, place, work in pieces:
            if piece.dtype == dtype:
                torch.sub(piece, centre[place], out=work)
            else:
                work.copy_(piece).sub_(centre[place])
            # Where the range is a few float steps wide, the centre is rounded by many levels, and codes would wrap.
            codes.copy_(work.mul_(factor[place]).round_().clamp_(-128, 127))
            if rounded:
                _store(work.mul_(level[place]).add_(centre[place]), piece, 0.0)


@dataclass(frozen=True)
class _Symmetric(_Blocked):
    """Every block goes to whole multiples of a fraction of its largest absolute value.

    With p the largest absolute value in the block, and n the largest code::

        c = round(v * n / p) in -n..n,   v' = c / n * p

    Zero, p and -p come back exactly, and so does a block of equal values. An outlier costs precision in its
    own block only. If a value is not finite, neither is its block's p, and so no decoded value of that block.

    Layout: p of all blocks (float32; float64 for float64 values), then the codes.
    """

    largest_code: ClassVar[int]

    def encode(self, values: Tensor, out: Tensor, *, overwrite: bool = False) -> None:
        """One pass: while a piece is in the cache, find its scales and write its codes."""
        dtype = _work_dtype(values.dtype)
        smallest = self.largest_code * torch.finfo(dtype).tiny  # so that n / p is finite
        out[-ALIGNMENT:].zero_()  # padding
        scales, pieces = self._rows(values, out, dtype, in_place=overwrite)
        for piece, codes, place, work in pieces:
            peak = scales[0, place]
            work.copy_(piece)
            # Two reductions over the cached piece: a single aminmax or norm is not vectorised, and slower.
            peak.copy_(
                torch.maximum(work.amax(1, keepdim=True), work.amin(1, keepdim=True).neg_()).clamp_(min=smallest)
            )
            work.mul_((peak / self.largest_code).reciprocal()).round_()
            self._pack(work, codes)

    def decode(self, codes: Tensor, out: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """One pass."""
        scales, pieces = self._rows(out, codes, _work_dtype(out.dtype), in_place=not beta)
        for piece, piece_codes, place, work in pieces:
            self._unpack(piece_codes, work)
            # The rounded 1/n times n is exactly 1, for both n.
            _store(work.mul_(1 / self.largest_code).mul_(scales[0, place] * alpha), piece, beta)

    @abstractmethod
    def _pack(self, work: Tensor, codes: Tensor) -> None:
        """Write whole numbers (as floats; may be overwritten) as bytes, row by row."""

    @abstractmethod
    def _unpack(self, codes: Tensor, work: Tensor) -> None:
        """Read them back."""


@dataclass(frozen=True)
class BlockInt8(_Symmetric):
    """Blocks of values, each rounded to one of 255 levels: -127/127 to 127/127 of the block's largest.

    Zero, the largest absolute value, and blocks of equal values come back exactly. An outlier costs precision
    in its own block only. If a value is not finite, no decoded value of its block is.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv:2110.02861.
    Differs from the paper: levels are equally spaced.

    Args:
        block: values per block, at least 1. The default of 1024 adds 0.4 % to the bytes (float64: 0.8 %).

    Raises:
        ValueError: ``block`` is not a positive whole number.
    """

    largest_code = 127
    codes_per_byte = 1

    def _pack(self, work: Tensor, codes: Tensor) -> None:
        codes.copy_(work)

    def _unpack(self, codes: Tensor, work: Tensor) -> None:
        work.copy_(codes)


@dataclass(frozen=True)
class BlockInt4(_Symmetric):
    """Blocks of values, each rounded to one of 15 levels: -7/7 to 7/7 of the block's largest.

    A byte holds two codes as digits of a number to base 16, low + 16 * high in -119..119. The first half of a
    block makes the low digits, the second half the high ones. Otherwise as :class:`BlockInt8`.

    Args:
        block: values per block, at least 1. The default of 1024 adds 0.8 % to the bytes (float64: 1.6 %).

    Raises:
        ValueError: ``block`` is not a positive whole number.
    """

    largest_code = 7
    codes_per_byte = 2

    def _pack(self, work: Tensor, codes: Tensor) -> None:
        half = codes.shape[1]
        low, high = work[:, :half], work[:, half:]
        low[:, : high.shape[1]].add_(high, alpha=16)
        codes.copy_(low)

    def _unpack(self, codes: Tensor, work: Tensor) -> None:
        half = codes.shape[1]
        low, high = work[:, :half], work[:, half:]
        low.copy_(codes)
        # The low digit is less than half of 16 in size.
        torch.mul(low[:, : high.shape[1]], 1 / 16, out=high).round_()
        low[:, : high.shape[1]].sub_(high, alpha=16)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision to work in, and to store scales in."""
    if dtype == torch.float64:
        return torch.float64
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.float32
    raise TypeError(f"only float16, bfloat16, float32 and float64 tensors can be encoded, got {dtype}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _sections(buffer: Tensor, num_scales: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split bytes into scales and int8 codes, with the padding at their end."""
    start = num_scales * dtype.itemsize
    return buffer[:start].view(dtype), buffer[start:].view(torch.int8)


def _piece_numel(values: Tensor) -> int:
    # Every thread has its own cache.
    on_cpu = values.device.type == "cpu"
    return PIECE_NUMEL * torch.get_num_threads() if on_cpu else max(1, values.numel())


def _pieces(
    values: Tensor, codes: Tensor, dtype: torch.dtype, in_place: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield pieces of values and codes, and room to work in: a buffer, or the values' own if that can be."""
    in_place = in_place and values.dtype == dtype
    size = _piece_numel(values)
    work = values.new_empty(0 if in_place else min(size, values.numel()), dtype=dtype)
    codes = codes[: values.numel()]
    for piece, piece_codes in zip(torch.split(values, size), torch.split(codes, size), strict=True):
        yield piece, piece_codes, piece if in_place else work[: piece.numel()]


def _store(work: Tensor, piece: Tensor, beta: float) -> None:
    if beta == 0.0:
        piece.copy_(work)  # nothing to do if they are the same
    elif beta == 1.0:
        piece.add_(work)
    elif work.dtype == piece.dtype:
        torch.add(work, piece, alpha=beta, out=piece)
    else:
        piece.mul_(beta).add_(work)


def _encode_as(dtype: torch.dtype, values: Tensor, out: Tensor) -> None:
    out[-ALIGNMENT:].zero_()  # padding
    out[: values.numel() * dtype.itemsize].view(dtype).copy_(values)


def _decode_as(dtype: torch.dtype, codes: Tensor, out: Tensor, alpha: float, beta: float) -> None:
    values = codes[: out.numel() * dtype.itemsize].view(dtype)
    for piece, piece_values, work in _pieces(out, values, _work_dtype(out.dtype), in_place=not beta):
        _store(work.copy_(piece_values).mul_(alpha), piece, beta)
