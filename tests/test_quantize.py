"""Codecs: every value comes back near where it was, and whatever is not finite stays so."""

import math
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_distopt import bench, quantize
from lightning_distopt.quantize import BFloat16, BlockInt4, BlockInt8, Float16, MinMaxUInt8, NoCompression

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BLOCKS = [BlockInt8(), BlockInt4(), BlockInt8(5), BlockInt4(5), BlockInt4(6), BlockInt4(1)]
QUANTISERS = [MinMaxUInt8(), *BLOCKS]
CODECS = [*QUANTISERS, Float16(), BFloat16(), NoCompression()]

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
all_codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)
all_quantisers = pytest.mark.parametrize("codec", QUANTISERS, ids=repr)


def encoded(codec, values, fill=0):
    """The bytes of ``values``, written over ``fill``."""
    out = torch.full((codec.encoded_bytes(values.numel(), values.dtype),), fill, dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded(codec, codes, like):
    """A new tensor with the dtype and numel of ``like``."""
    out = torch.full_like(like, math.nan)
    codec.decode(codes, out)
    return out


def round_trip(codec, values):
    """What the other side gets: the same, bit for bit, as what ``round_`` leaves on this side."""
    codes = encoded(codec, values)
    result = decoded(codec, codes, values)
    rounded, codes_of_rounded = values.clone(), torch.zeros_like(codes)
    codec.round_(rounded, codes_of_rounded)
    finite = result.isfinite()

    assert torch.equal(codes_of_rounded, codes)
    assert torch.equal(rounded.isfinite(), finite)
    assert torch.equal(rounded[finite].view(torch.uint8), result[finite].view(torch.uint8))
    return result


def normal(numel, dtype=torch.float32, seed=0):
    """Standard normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, dtype=torch.float64, generator=generator).to(dtype)


def half_level(codec, values):
    """The error that each value may have, in the same shape; ``values`` in float64."""
    if isinstance(codec, MinMaxUInt8):
        return ((values.max() / 2 - values.min() / 2) / 255).expand_as(values)
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % codec.block)).view(-1, codec.block)
    largest = blocks.amax(1).repeat_interleave(codec.block)[: values.numel()]
    return largest / 2 / codec.largest_code


def assert_near(codec, values):
    """Every value comes back finite and within half a level, and a few roundings of the largest value."""
    result = round_trip(codec, values)
    wide = values.double()
    work = torch.finfo(torch.float64 if values.dtype == torch.float64 else torch.float32)
    own = torch.finfo(values.dtype)
    negligible = work.tiny + own.tiny * own.eps
    allowed = half_level(codec, wide) * (1 + 4 * work.eps) + 2 * own.eps * wide.abs().max() + negligible

    assert torch.isfinite(result).all()
    assert ((result.double() - wide).abs() <= allowed).all()


# -- sizes ---------------------------------------------------------------------------------------------------


@all_codecs
def test_sizes_keep_what_lies_behind_aligned(codec):
    """Encoded sizes are multiples of 8, and grow with the tensor."""
    for dtype in DTYPES:
        sizes = [codec.encoded_bytes(numel, dtype) for numel in range(40)]

        assert all(size % 8 == 0 for size in sizes)
        assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("codec", "bytes_per_value"),
    [(MinMaxUInt8(), 1.005), (BlockInt8(), 1.01), (BlockInt4(), 0.51), (Float16(), 2), (BFloat16(), 2)],
    ids=repr,
)
def test_scales_add_little_to_the_codes(codec, bytes_per_value):
    """One byte per 8-bit code, half a byte per 4-bit code, and next to nothing for scales."""
    for dtype in DTYPES:
        assert codec.encoded_bytes(1_000_000, dtype) <= bytes_per_value * 1_000_000


@all_codecs
@all_dtypes
def test_encoding_writes_all_its_bytes_and_no_others(codec, dtype):
    """Several encoded tensors can lie one behind the other; nothing undefined is sent."""
    for numel in (0, 1, 2, 5, 6, 7, 8, 13, 2049):
        values = normal(numel, dtype)
        size = codec.encoded_bytes(numel, dtype)
        around = torch.full((size + 16,), 123, dtype=torch.uint8)
        codec.encode(values, around[8 : 8 + size])

        assert (around[:8] == 123).all()
        assert (around[8 + size :] == 123).all()
        assert torch.equal(around[8 : 8 + size], encoded(codec, values, fill=255))


# -- values --------------------------------------------------------------------------------------------------


@all_codecs
def test_an_empty_tensor_stays_empty(codec):
    """A chunk of no values has an encoding."""
    for dtype in DTYPES:
        assert round_trip(codec, torch.empty(0, dtype=dtype)).shape == (0,)


@all_quantisers
@all_dtypes
def test_equal_values_come_back_exactly(codec, dtype):
    """Constant tensors are not changed at all."""
    for value in (0.0, 1.0, -0.1, 1e-30, math.pi * 1e30, 3e38, -1e-35):
        for numel in (1, 4, 2051):
            values = torch.full((numel,), value, dtype=torch.float64).to(dtype)
            if torch.isfinite(values).all():
                assert torch.equal(round_trip(codec, values), values)


@all_dtypes
def test_equal_subnormal_values(dtype):
    """They come back exactly from MinMaxUInt8; blocks round them to about the smallest normal number."""
    values = torch.full((9,), -3 * torch.finfo(dtype).tiny / 8, dtype=dtype)

    assert torch.equal(round_trip(MinMaxUInt8(), values), values)
    for codec in BLOCKS:
        assert_near(codec, values)


@all_quantisers
@all_dtypes
def test_errors_stay_below_half_a_level_at_every_scale(codec, dtype):
    """Ranges far from one, subnormal, or small beside the values lose no more precision than the codes do."""
    uniform = 2 * torch.rand(1100, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 1
    info = torch.finfo(dtype)
    for scale in (1.0, 1e-30, 1e30, 3e38, 1e-37, 1e-38, 1e-42, 1e-310):
        for offset in (0.0, 1.0, -1000.0):
            assert_near(codec, (offset + scale * uniform).clamp(info.min, info.max).to(dtype))


@all_quantisers
@all_dtypes
def test_the_largest_numbers_do_not_overflow(codec, dtype):
    """No intermediate result leaves the range of floats, even where max - min does."""
    info = torch.finfo(dtype)
    for numbers in (
        [info.max, info.min],
        [info.max, 0.0, info.min / 3],
        [info.min, info.min / 2],
        [info.max] * 3,
    ):
        assert_near(codec, torch.tensor(numbers, dtype=dtype))


@all_quantisers
@all_dtypes
def test_ranges_of_a_few_float_steps(codec, dtype):
    """Codes do not wrap where the middle of the range is rounded by a good part of the range."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for base in (1.0, -1.5, torch.finfo(dtype).max, torch.finfo(dtype).min):
        for num_steps in (1, 2, 3, 5, 101, 127, 128, 300):
            bits = torch.tensor([base], dtype=dtype).view(integers)
            assert_near(codec, (bits - torch.arange(num_steps + 1, dtype=integers)).view(dtype))


def bits_to_floats(bits, dtype):
    """Every bit pattern is a float."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor(bits, dtype=torch.int64).to(integers).view(dtype)


@given(
    codec=st.sampled_from(QUANTISERS),
    dtype=st.sampled_from(DTYPES),
    bits=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=400)
def test_any_finite_values_come_back_near(codec, dtype, bits):
    """Whatever the numbers are."""
    values = bits_to_floats(bits, dtype)
    values = values[torch.isfinite(values)]
    if values.numel():
        assert_near(codec, values)


def test_the_codes_are_those_of_the_formula():
    """MinMaxUInt8 is q = round((v - lo) * 255 / (hi - lo)), v' = lo + q * (hi - lo) / 255."""
    values = normal(5000)
    codec = MinMaxUInt8(block=5000)
    low, high = values.double().min(), values.double().max()
    position = (values.double() - low) * 255 / (high - low)
    result = round_trip(codec, values).double()
    # Between two levels, roundings decide.
    clear = ((position % 1) - 0.5).abs() > 1e-3

    assert clear.sum() > 4900
    torch.testing.assert_close(result[clear], (low + position.round() * (high - low) / 255)[clear], rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", BLOCKS, ids=repr)
@all_dtypes
def test_blocks_keep_zeros_and_their_largest_values(codec, dtype):
    """What did not change is sent as no change; the ends of each block's range are exact."""
    values = normal(2100, dtype)
    values[::3] = 0
    result = round_trip(codec, values)

    assert (result[::3] == 0).all()
    for block, decoded_block in zip(values.split(codec.block), result.split(codec.block), strict=True):
        largest = block.abs() == block.abs().max()
        assert torch.equal(decoded_block[largest], block[largest])


@pytest.mark.parametrize("codec", [BlockInt8(5), BlockInt4(5), BlockInt4(6)], ids=repr)
def test_an_outlier_stays_in_its_block(codec):
    """Values of other blocks come back as without it."""
    values = normal(33)
    before = round_trip(codec, values)
    values[2 * codec.block] = 1e30
    after = round_trip(codec, values)
    others = torch.arange(33) // codec.block != 2

    assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("codec", [BlockInt8(5), BlockInt4(5), BlockInt4(6), BlockInt4(7)], ids=repr)
@pytest.mark.parametrize("numel", range(1, 16))
def test_every_code_at_every_place(codec, numel):
    """Whole numbers up to the largest code come back exactly, wherever they stand in their block or byte."""
    randint = random.Random(numel).randint
    values = torch.tensor([float(randint(-codec.largest_code, codec.largest_code)) for _ in range(numel)])
    values[:: codec.block] = codec.largest_code

    torch.testing.assert_close(round_trip(codec, values), values, rtol=1e-6, atol=0)


@all_dtypes
def test_no_compression_is_exact(dtype):
    """Every bit comes back, also of zeros' signs and infinities."""
    values = torch.cat([normal(100_000, dtype), torch.tensor([0.0, -0.0, math.inf, -math.inf], dtype=dtype)])

    assert torch.equal(round_trip(NoCompression(), values).view(torch.uint8), values.view(torch.uint8))


@all_dtypes
def test_16_bit_codecs_round_as_torch_does(dtype):
    """Also where they overflow: the result is infinite, not wrong."""
    values = torch.cat([normal(100_000, dtype), torch.tensor([6e4, 1e5, -1e30, 1e-9], dtype=dtype)])

    assert torch.equal(round_trip(Float16(), values), values.half().to(dtype))
    assert torch.equal(round_trip(BFloat16(), values), values.bfloat16().to(dtype))


# -- not finite ----------------------------------------------------------------------------------------------


@all_dtypes
def test_no_finite_value_survives_beside_an_infinite_one(dtype):
    """MinMaxUInt8: one infinity or NaN, anywhere, makes the whole tensor not finite."""
    inf, nan = math.inf, math.nan
    for bad in ([inf], [-inf], [nan], [inf, -inf], [nan, inf], [-inf, nan]):
        for scale in (0.0, 1.0, 3e4):
            for place in (0, 17, 39):
                values = normal(40, dtype) * scale
                values[place : place + len(bad)] = torch.tensor(bad[: 40 - place], dtype=dtype)

                assert not torch.isfinite(round_trip(MinMaxUInt8(), values)).any()


@all_dtypes
def test_only_values_that_are_not_finite(dtype):
    """A tensor or block without any finite value is no special case."""
    for bad in (math.inf, -math.inf, math.nan):
        for codec in CODECS:
            assert not torch.isfinite(round_trip(codec, torch.full((7,), bad, dtype=dtype))).any()


@pytest.mark.parametrize("codec", [BlockInt8(5), BlockInt4(5), BlockInt4(6)], ids=repr)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@all_dtypes
def test_the_block_of_a_value_that_is_not_finite(codec, bad, dtype):
    """It is lost as a whole, even if all else in it is zero; the other blocks are as before."""
    values = normal(33, dtype)
    values[codec.block : 2 * codec.block] = 0
    before = round_trip(codec, values)
    for place in range(33):
        poisoned = values.clone()
        poisoned[place] = bad
        after = round_trip(codec, poisoned)
        own = torch.arange(33) // codec.block == place // codec.block

        assert not torch.isfinite(after[own]).any()
        assert torch.equal(after[~own], before[~own])


@all_codecs
def test_a_mean_with_an_infinite_part_is_not_finite(codec):
    """The factor and the sum do not hide it."""
    values = normal(20)
    poisoned = values.clone()
    poisoned[3] = math.inf
    mean = values.clone()
    codec.decode(encoded(codec, poisoned), mean, alpha=0.5, beta=1.0)

    assert not math.isfinite(mean[3])


# -- factors and sums ----------------------------------------------------------------------------------------


@all_codecs
@all_dtypes
def test_decoding_multiplies_and_adds(codec, dtype):
    """The results of ``alpha`` and ``add`` are those of separate operations, up to rounding."""
    eps = torch.finfo(dtype).eps
    for numel in (1, 13, 2049):
        values, start = normal(numel, dtype), normal(numel, dtype, seed=1)
        codes = encoded(codec, values)
        once = decoded(codec, codes, values).double()
        scaled, added = torch.full_like(values, math.nan), start.clone()
        codec.decode(codes, scaled, alpha=-0.3)
        codec.decode(codes, added, alpha=3.0, beta=1.0)

        torch.testing.assert_close(scaled.double(), -0.3 * once, rtol=2 * eps, atol=2 * eps)
        torch.testing.assert_close(added.double(), start.double() + 3 * once, rtol=2 * eps, atol=12 * eps)


@all_quantisers
def test_the_mean_of_equal_tensors(codec):
    """Four encodings of one tensor average to its decoding, in place over what the buffer held."""
    values = normal(3000)
    codes = encoded(codec, values)
    mean = torch.full_like(values, math.nan)
    for k in range(4):
        codec.decode(codes, mean, alpha=1 / 4, beta=float(k > 0))

    torch.testing.assert_close(mean, decoded(codec, codes, values), rtol=1e-6, atol=1e-6)


# -- how it works --------------------------------------------------------------------------------------------


@all_codecs
@all_dtypes
def test_the_size_of_pieces_changes_nothing(codec, dtype, monkeypatch):
    """A tensor worked on in pieces gives the bytes and values of one worked on as a whole."""

    def bytes_and_values(numel, beta):
        codes = encoded(codec, normal(numel, dtype))
        out = normal(numel, dtype, seed=1)
        codec.decode(codes, out, alpha=0.3, beta=beta)
        return codes, out

    cases = [(numel, beta) for numel in (0, 6, 7, 8, 31, 35, 100) for beta in (0.0, 1.0, 0.5)]
    whole = [bytes_and_values(*case) for case in cases]
    monkeypatch.setattr(quantize, "PIECE_NUMEL", 7)
    for case, (codes, out) in zip(cases, whole, strict=True):
        codes_of_pieces, out_of_pieces = bytes_and_values(*case)

        assert torch.equal(codes_of_pieces, codes)
        assert torch.equal(out_of_pieces, out)


@all_codecs
@all_dtypes
def test_values_that_may_be_overwritten_give_the_same_bytes(codec, dtype):
    """Working in the values' own memory changes nothing but that memory; without leave they are as they were."""
    values = normal(3 * 4096 + 77, dtype)
    kept, codes = values.clone(), torch.empty(codec.encoded_bytes(values.numel(), dtype), dtype=torch.uint8)
    expected = encoded(codec, values)

    assert torch.equal(values, kept)

    codec.encode(values, codes, overwrite=True)

    assert torch.equal(codes, expected)


@all_codecs
def test_tensors_of_several_pieces(codec):
    """All pieces are encoded and decoded, the last and shorter one too."""
    values = normal(3 * quantize.PIECE_NUMEL + 1234)
    result = round_trip(codec, values)

    assert (result - values).abs().max() < 0.5
    assert (result - values).abs().mean() < 0.15


class NoHostSync(TorchDispatchMode):
    """Fail where Python asks for a tensor's value: on CUDA the host would wait for the GPU there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert torch.Tag.data_dependent_output not in function.tags, f"{function} needs a value on the host"
        assert torch.Tag.dynamic_output_shape not in function.tags, f"{function} needs a value on the host"
        return function(*args, **(kwargs or {}))


@all_codecs
def test_the_host_never_waits(codec):
    """No operation takes a value from a tensor to Python."""
    with NoHostSync():
        with pytest.raises(AssertionError, match="on the host"):
            torch.ones(1).item()
        for dtype in DTYPES:
            for numel in (0, 1, 2049):
                values = normal(numel, dtype)
                codes = encoded(codec, values)
                codec.decode(codes, values, alpha=0.5, beta=1.0)
                codec.decode(codes, values)


@pytest.mark.gpu
@all_codecs
def test_cuda_decodes_the_same_values(codec):
    """The same bytes give the same values on CPU and GPU, whichever wrote them, and the host never waits."""
    for dtype in DTYPES:
        for numel in (0, 1, 13, 200_001):
            values = normal(numel, dtype)
            codes = encoded(codec, values)
            there, codes_there = values.cuda(), codes.cuda()
            result, own, own_codes = there.clone(), there.clone(), codes_there.clone()
            torch.cuda.set_sync_debug_mode("error")
            try:
                codec.decode(codes_there, result)
                codec.encode(there, own_codes)
                codec.decode(own_codes, own)
            finally:
                torch.cuda.set_sync_debug_mode("default")

            assert torch.equal(result.cpu(), decoded(codec, codes, values))
            assert torch.equal(own.cpu(), decoded(codec, own_codes.cpu(), values))


# -- configuration -------------------------------------------------------------------------------------------


@all_codecs
def test_codecs_pickle_and_compare_by_value(codec):
    """A codec can go to another process, and be a key."""
    copy = pickle.loads(pickle.dumps(codec))

    assert copy == codec
    assert hash(copy) == hash(codec)


@pytest.mark.parametrize("kind", [BlockInt8, BlockInt4])
@pytest.mark.parametrize("block", [0, -4, 2.5, None])
def test_a_block_is_a_positive_whole_number(kind, block):
    """Anything else is refused at once, with the value."""
    with pytest.raises(ValueError, match=f"block must be a whole number .* got {block}"):
        kind(block)


@all_codecs
def test_other_types_are_refused_by_name(codec):
    """Only real floating values can be encoded."""
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"got {dtype}"):
            codec.encoded_bytes(10, dtype)


# -- cost ----------------------------------------------------------------------------------------------------


def test_the_benchmark_prints_every_codec(capsys):
    """One line per codec, with sizes and times."""
    bench.bench_quantize(num_bytes=4_000_000, rounds=1)
    lines = capsys.readouterr().out.splitlines()

    assert lines[0].startswith("4 MB of float32, one thread, median of 1 rounds. clone(): ")
    assert [line.split()[:2] for line in lines[2:]] == [
        ["MinMaxUInt8", "1.002"],
        ["BlockInt8", "1.004"],
        ["BlockInt4", "0.504"],
        ["Float16", "2.000"],
        ["NoCompression", "4.000"],
    ]


@pytest.mark.slow
def test_encoding_costs_no_more_than_a_copy():
    """Measured in turns on one thread, neither encoding nor decoding takes longer than ``clone()``."""
    values = torch.randn(25_000_000)
    codec = MinMaxUInt8()
    codes, result = encoded(codec, values), torch.empty_like(values)
    ms = bench.interleaved_ms(
        {
            "clone": values.clone,
            "encode": lambda: codec.encode(values, codes),
            "decode": lambda: codec.decode(codes, result),
        },
        rounds=5,
    )

    assert ms["encode"] <= ms["clone"]
    assert ms["decode"] <= ms["clone"]
