"""Planes put together while they are decoded: Huffman-coded zstd blocks (RFC 8878) and raw low bytes, by compiled code.

libzstd's fastest loop looks up two symbols at a time and knows nothing of what becomes of them. High bytes of hidden
states take three bits each, so that a table of eleven bits tells three or four of them at once (several symbols an
entry: as Giesen's decoders do, https://fgiesen.wordpress.com/2021/08/30/entropy-coding-in-oodle-data-huffman-coding/),
and each block of 128 KiB is put together with its low bytes while it lies in the processor's cache.

Only what ``compress_huffman`` makes is decoded here: blocks of four Huffman streams without sequences. Everything else,
and everything that is not as it must be, is left to libzstd, which has the last word on it. Importing this module
imports numba, and the first call compiles (seconds; numba keeps the result on the disk).

All offsets are signed 64-bit; nothing is read outside ``frame`` nor written outside ``out`` and buffers made here,
whatever ``frame`` holds: the comments say why where an address is used without a look.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, int64, njit, types, uint8, uint16, uint64
from numba.extending import intrinsic

from hsx_dist.logger import get_logger
from hsx_dist.store.folders import is_trusted

#: Bits of a look-up: zstd's literals have codes of at most so many.
_WIDTH = 11
_ENTRIES = 1 << _WIDTH
#: Look-ups between two refills: 5 times 11 bits, where at least 56 are there.
_LOOKUPS = 5
#: Symbols that one look-up tells at most; all four bytes are stored, whatever their number.
_MOST = 4
_MAX_BLOCK = 128 << 10
#: Between the four streams' symbols: without it those of a whole block lie 32 KiB apart, in the same few places of a
#: first-level cache, and put one another out of it.
_GAP = 17 * 64
_MAX_WEIGHTS = 256

# An entry of a table: the bits of its codes in byte 0, up to four symbols in bytes 2 to 5, their number in byte 7.
_SYMBOLS = 0xFFFFFFFF << 16
_WORD = (1 << 64) - 1


@intrinsic  # type: ignore[untyped-decorator]
def _load64(_: Any, address: Any) -> Any:  # noqa: ARG001
    """Eight bytes at an address, which need not be aligned."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]
def _store32(_: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    """The low four bytes of ``value`` to an address, which need not be aligned."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        place = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        builder.store(builder.trunc(arguments[1], ir.IntType(32)), place, align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(_: Any, value: Any) -> Any:  # noqa: ARG001
    """Of a value that is not 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), code


if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and what follows works on addresses")


def _caches() -> bool:
    """Whether numba may keep compiled code. It unpickles what it finds in its folder, so no other user may write it."""
    given = Path(config.CACHE_DIR) if config.CACHE_DIR else None
    if given is None or is_trusted(given):
        try:
            folder = Path(njit(cache=True)(_nothing).stats.cache_path)
        except RuntimeError:  # no folder that may be written
            return False
        # Python itself runs what it finds in the package's __pycache__.
        if folder == Path(__file__).parent / "__pycache__" or is_trusted(folder):
            return True
    else:
        folder = given
    get_logger(__name__).warning(
        "expected a cache of numba that only this user can write, got %s, which another user can write or replace. "
        "Each process compiles the decoder; set NUMBA_CACHE_DIR to an empty folder of mode 0700 that you own",
        folder,
    )
    return False


def _nothing() -> None:
    pass


_CACHES = _caches()


def _jit(*signature: Any, **options: Any) -> Callable[[Any], Any]:
    """numba's ``njit`` that releases the interpreter's lock, and keeps the compiled code where there is a place."""

    def compiled(function: Any) -> Any:
        return njit(*signature, nogil=True, cache=_CACHES, **options)(function)

    return compiled


_compiled = _jit()
_inlined = _jit(inline="always")


@_inlined
def _highest_bit(value):  # type: ignore[no-untyped-def]
    """Its number; -1 of 0."""
    found = -1
    while value > 0:
        value >>= 1
        found += 1
    return found


@_inlined
def _little(data, at, nbytes):  # type: ignore[no-untyped-def]
    value = 0
    for k in range(nbytes):
        value |= int64(data[at + k]) << (8 * k)
    return value


@_inlined
def _bits_of(data, start, size):  # type: ignore[no-untyped-def]
    """Bits of a stream that is read from its end: those below the highest one of its last byte. -1 if there is none."""
    last = int64(data[start + size - 1])
    return (size - 1) * 8 + _highest_bit(last) if last else -1


@_compiled
def _before(data, start, bits, count):  # type: ignore[no-untyped-def]
    """The ``count`` bits of a stream below its bit ``bits`` (more than 0); zeros where it has begun."""
    low = bits - count
    first = max(low, 0)
    value = 0
    for k in range((bits - 1) >> 3, (first >> 3) - 1, -1):
        value = (value << 8) | int64(data[start + k])
    value = (value >> (first & 7)) & ((1 << (bits - first)) - 1)
    return value << -low if low < 0 else value


# -- the tree (RFC 8878, 4.2.1) --------------------------------------------------------------------------------------


@_compiled
def _weights(data, at, end, weights):  # type: ignore[no-untyped-def]
    """The tree's description at ``data[at:end]`` → (its bytes, how many weights); (-1, 0) where it is none."""
    if at >= end:
        return -1, 0
    head = int64(data[at])
    at += 1
    if head >= 128:  # four bits each
        count = head - 127
        size = (count + 1) // 2
        if at + size > end:
            return -1, 0
        for i in range(count):
            byte = int64(data[at + i // 2])
            weights[i] = byte >> 4 if i % 2 == 0 else byte & 15
        return 1 + size, count
    if head < 2 or at + head > end:
        return -1, 0
    symbols, bits, states = np.zeros(64, np.int64), np.zeros(64, np.int64), np.zeros(64, np.int64)
    used, log = _states(data, at, at + head, symbols, bits, states)
    if used < 0 or used >= head:
        return -1, 0
    start = at + used
    left = _bits_of(data, start, head - used)
    if left < 2 * log:
        return -1, 0
    # Two states take turns; the one whose turn it would be when there are no bits left says the last weight.
    state = _before(data, start, left, log)
    left -= log
    other = _before(data, start, left, log)
    left -= log
    count = 0
    while count < _MAX_WEIGHTS - 3:
        weights[count] = symbols[state]
        count += 1
        wanted = bits[state]
        if wanted > left:
            weights[count] = symbols[other]
            return 1 + head, count + 1
        following = states[state]
        if wanted > 0:
            following += _before(data, start, left, wanted)
            left -= wanted
        state, other = other, following
    return -1, 0


@_compiled
def _states(data, at, end, symbols, bits, states):  # type: ignore[no-untyped-def]
    """The FSE table of the weights (RFC 8878, 4.1.1) into arrays of 64 → (bytes of its description, its log); (-1, 0)
    where it is none."""
    total = (end - at) * 8
    log = (int64(data[at]) & 15) + 5
    if log > 6:
        return -1, 0
    place = 4
    size = 1 << log
    counts = np.zeros(16, np.int64)
    left, threshold, width = size + 1, size, log + 1
    symbol = 0
    zero = False
    while left > 1:
        if zero:
            repeat = 3
            while repeat == 3:
                if place + 2 > total:
                    return -1, 0
                repeat = 0
                for k in range(2):
                    repeat |= ((int64(data[at + ((place + k) >> 3)]) >> ((place + k) & 7)) & 1) << k
                place += 2
                symbol += repeat
        if symbol > _WIDTH + 1:
            return -1, 0
        value = 0
        for k in range(width):
            if place + k < total:
                value |= ((int64(data[at + ((place + k) >> 3)]) >> ((place + k) & 7)) & 1) << k
        most = 2 * threshold - 1 - left
        if value & (threshold - 1) < most:
            value &= threshold - 1
            place += width - 1
        else:
            if value >= threshold:
                value -= most
            place += width
        if place > total:
            return -1, 0
        counts[symbol] = value - 1
        left -= abs(value - 1)
        if left < 1:
            return -1, 0
        zero = value == 1
        symbol += 1
        while left < threshold:
            width -= 1
            threshold >>= 1
    # The counts add up to the table's size, so that every place below gets one symbol.
    high = size - 1
    following = np.zeros(16, np.int64)
    for s in range(symbol):
        following[s] = abs(counts[s])
        if counts[s] < 0:
            symbols[high] = s
            high -= 1
    step = (size >> 1) + (size >> 3) + 3
    to = 0
    for s in range(symbol):
        for _ in range(counts[s]):
            symbols[to] = s
            to = (to + step) & (size - 1)
            while to > high:
                to = (to + step) & (size - 1)
    for i in range(size):
        number = following[symbols[i]]
        following[symbols[i]] += 1
        bits[i] = log - _highest_bit(number)
        states[i] = (number << bits[i]) - size
    return (place + 7) >> 3, log


@_inlined
def _fits(a, b):  # type: ignore[no-untyped-def]
    """``b`` where the codes of both entries are not more bits than a look-up has; else none."""
    return b if (a & uint64(255)) + (b & uint64(255)) <= uint64(_WIDTH) else uint64(0)


@_inlined
def _join(a, b):  # type: ignore[no-untyped-def]
    """The symbols of two entries, one behind the other."""
    return a + (b & uint64(~_SYMBOLS & _WORD)) + ((b & uint64(_SYMBOLS)) << (a >> uint64(56) << uint64(3)))


@_compiled
def _tables(weights, count, single, several):  # type: ignore[no-untyped-def]
    """Of ``count`` weights and the one that follows from them: entries of one symbol, and of up to four. False where
    they are no tree."""
    total = 0
    for i in range(count):
        if weights[i] > _WIDTH:
            return False
        if weights[i] > 0:
            total += 1 << (weights[i] - 1)
    log = _highest_bit(total) + 1
    left = (1 << log) - total
    if total == 0 or log > _WIDTH or left & (left - 1):
        return False
    weights[count] = _highest_bit(left) + 1
    # All of them together fill the table exactly: the longest codes first, of as many bits the symbols in order.
    places = np.zeros(_WIDTH + 2, np.int64)
    for i in range(count + 1):
        places[weights[i]] += 1
    if places[1] < 2:
        return False  # the tree is deeper than its codes, which libzstd refuses
    at = 0
    for weight in range(1, log + 1):
        many = places[weight]
        places[weight] = at
        at += many << (weight - 1 + _WIDTH - log)
    for s in range(count + 1):
        weight = weights[s]
        if weight > 0:
            entry = uint64(log + 1 - weight) | uint64(s) << uint64(16) | uint64(1) << uint64(56)
            at = places[weight]
            places[weight] = at + (1 << (weight - 1 + _WIDTH - log))
            single[at : places[weight]] = entry
    pairs = np.empty(_ENTRIES, np.uint64)
    mask = uint64(_ENTRIES - 1)
    for i in range(_ENTRIES):
        first = single[i]
        pairs[i] = _join(first, _fits(first, single[uint64(i) << (first & uint64(63)) & mask]))
    for i in range(_ENTRIES):
        first = pairs[i]
        rest = uint64(i) << (first & uint64(63)) & mask
        second = _fits(first, pairs[rest])
        several[i] = _join(first, second if second else _fits(first, single[rest]))
    return True


# -- the streams (RFC 8878, 4.2.2) -----------------------------------------------------------------------------------


@_compiled
def _finish(data, start, bits, single, out, at, end):  # type: ignore[no-untyped-def]
    """The rest of a stream, symbol by symbol, into ``out[at:end]``; whether it has exactly as many."""
    while at < end:
        if bits <= 0:
            return False
        entry = single[_before(data, start, bits, _WIDTH)]
        bits -= int64(entry & uint64(255))
        if bits < 0:
            return False
        out[at] = (entry >> uint64(16)) & uint64(255)
        at += 1
    return bits == 0


@_compiled
def _alone(following, source, begin, put, stop, table):  # type: ignore[no-untyped-def]
    """One stream on, as far as no look is needed → what of it comes next, from where, and to where."""
    while True:
        rounds = min(int64(source - begin) // 7, int64(stop - put) // (_LOOKUPS * _MOST))
        if rounds <= 0:
            return following, source, put
        for _ in range(rounds):
            for _ in range(_LOOKUPS):
                entry = _load64(table + (following >> uint64(64 - _WIDTH) << uint64(3)))
                following <<= entry & uint64(63)
                _store32(put, entry >> uint64(16))
                put += entry >> uint64(56)
            taken = _trailing_zeros(following)
            source -= taken >> uint64(3)
            following = (_load64(source) | uint64(1)) << (taken & uint64(7))


@_compiled
def _streams(data, at, end, single, several, out, count):  # type: ignore[no-untyped-def]
    """Four streams at ``data[at:end]`` into a quarter of ``count`` symbols each (the last one fewer), ``_GAP`` apart in
    ``out``; whether they have exactly as many."""
    start1 = at + 6
    if start1 >= end:
        return False
    start2 = start1 + _little(data, at, 2)
    start3 = start2 + _little(data, at + 2, 2)
    start4 = start3 + _little(data, at + 4, 2)
    least = min(start2 - start1, start3 - start2, start4 - start3, end - start4)
    quarter = (count + 3) // 4
    if least < 1 or 3 * quarter >= count:
        return False
    bits1, bits2 = _bits_of(data, start1, start2 - start1), _bits_of(data, start2, start3 - start2)
    bits3, bits4 = _bits_of(data, start3, start4 - start3), _bits_of(data, start4, end - start4)
    if min(bits1, bits2, bits3, bits4) < 0:
        return False
    to1, to2, to3, to4 = 0, quarter + _GAP, 2 * (quarter + _GAP), 3 * (quarter + _GAP)
    end1, end2, end3, end4 = to1 + quarter, to2 + quarter, to3 + quarter, to4 + count - 3 * quarter
    if least >= 16:
        # Each stream's next bits, highest first, and behind them a 1 whose place tells how many were taken. A refill
        # goes down by at most 7 bytes, and a round's stores go up by at most 20: so many rounds need no look.
        memory, place, table = uint64(data.ctypes.data), uint64(out.ctypes.data), uint64(several.ctypes.data)
        begin1, begin2 = memory + uint64(start1), memory + uint64(start2)
        begin3, begin4 = memory + uint64(start3), memory + uint64(start4)
        from1, from2 = begin2 - uint64(8), begin3 - uint64(8)
        from3, from4 = begin4 - uint64(8), memory + uint64(end - 8)
        next1 = (_load64(from1) | uint64(1)) << uint64((start2 - start1) * 8 - bits1)
        next2 = (_load64(from2) | uint64(1)) << uint64((start3 - start2) * 8 - bits2)
        next3 = (_load64(from3) | uint64(1)) << uint64((start4 - start3) * 8 - bits3)
        next4 = (_load64(from4) | uint64(1)) << uint64((end - start4) * 8 - bits4)
        top, three, seven, six = uint64(64 - _WIDTH), uint64(3), uint64(7), uint64(63)
        symbols, number = uint64(16), uint64(56)
        stop1, stop2, stop3, stop4 = (
            place + uint64(end1),
            place + uint64(end2),
            place + uint64(end3),
            place + uint64(end4),
        )
        put1, put2, put3, put4 = place, place + uint64(to2), place + uint64(to3), place + uint64(to4)
        while True:
            down = min(int64(from1 - begin1), int64(from2 - begin2), int64(from3 - begin3), int64(from4 - begin4))
            up = min(int64(stop1 - put1), int64(stop2 - put2), int64(stop3 - put3), int64(stop4 - put4))
            rounds = min(down // 7, up // (_LOOKUPS * _MOST))
            if rounds <= 0:
                break
            for _ in range(rounds):
                for _ in range(_LOOKUPS):
                    entry = _load64(table + (next1 >> top << three))
                    next1 <<= entry & six
                    _store32(put1, entry >> symbols)
                    put1 += entry >> number
                    entry = _load64(table + (next2 >> top << three))
                    next2 <<= entry & six
                    _store32(put2, entry >> symbols)
                    put2 += entry >> number
                    entry = _load64(table + (next3 >> top << three))
                    next3 <<= entry & six
                    _store32(put3, entry >> symbols)
                    put3 += entry >> number
                    entry = _load64(table + (next4 >> top << three))
                    next4 <<= entry & six
                    _store32(put4, entry >> symbols)
                    put4 += entry >> number
                taken = _trailing_zeros(next1)
                from1 -= taken >> three
                next1 = (_load64(from1) | uint64(1)) << (taken & seven)
                taken = _trailing_zeros(next2)
                from2 -= taken >> three
                next2 = (_load64(from2) | uint64(1)) << (taken & seven)
                taken = _trailing_zeros(next3)
                from3 -= taken >> three
                next3 = (_load64(from3) | uint64(1)) << (taken & seven)
                taken = _trailing_zeros(next4)
                from4 -= taken >> three
                next4 = (_load64(from4) | uint64(1)) << (taken & seven)
        # Some streams have more bits a symbol than others, and are not as far.
        next1, from1, put1 = _alone(next1, from1, begin1, put1, stop1, table)
        next2, from2, put2 = _alone(next2, from2, begin2, put2, stop2, table)
        next3, from3, put3 = _alone(next3, from3, begin3, put3, stop3, table)
        next4, from4, put4 = _alone(next4, from4, begin4, put4, stop4, table)
        bits1 = int64(from1 - begin1) * 8 + 64 - int64(_trailing_zeros(next1))
        bits2 = int64(from2 - begin2) * 8 + 64 - int64(_trailing_zeros(next2))
        bits3 = int64(from3 - begin3) * 8 + 64 - int64(_trailing_zeros(next3))
        bits4 = int64(from4 - begin4) * 8 + 64 - int64(_trailing_zeros(next4))
        to1, to2, to3, to4 = int64(put1 - place), int64(put2 - place), int64(put3 - place), int64(put4 - place)
    return (
        _finish(data, start1, bits1, single, out, to1, end1)
        and _finish(data, start2, bits2, single, out, to2, end2)
        and _finish(data, start3, bits3, single, out, to3, end3)
        and _finish(data, start4, bits4, single, out, to4, end4)
    )


# -- blocks ----------------------------------------------------------------------------------------------------------


@_inlined
def _merge(low, high, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = uint16(low[i]) | uint16(high[i]) << uint16(8)


@_compiled
def _place(low, high, out, done, count, width, pitch):  # type: ignore[no-untyped-def]
    """``count`` values behind the first ``done``, into rows of ``width`` that lie ``pitch`` apart."""
    if width == pitch:
        _merge(low[done : done + count], high, out[done : done + count])
        return
    at = 0
    while at < count:
        row, column = (done + at) // width, (done + at) % width
        many = min(width - column, count - at)
        to = row * pitch + column
        _merge(low[done + at : done + at + many], high[at : at + many], out[to : to + many])
        at += many


_READ = types.Array(uint8, 1, "C", readonly=True)
_WRITTEN = types.Array(uint16, 1, "C")


@_jit(types.boolean(_READ, int64, int64, _READ, _WRITTEN, int64, int64))
def join_planes(frame, at, largest, low, out, width, pitch):  # type: ignore[no-untyped-def]
    """Fill rows with ``low``, uint8 ``[n]``, and above it the high bytes in ``frame``, a zstd frame whose first block
    begins at ``at``, and whose blocks hold ``largest`` bytes at most.

    ``out``: uint16, the memory from the first row's begin to the last one's end; rows have ``width`` values and begin
    ``pitch`` values apart. False where this is not for us: libzstd must decode it, or refuse it; the rows then mean
    nothing.
    """
    single, several = np.empty(_ENTRIES, np.uint64), np.empty(_ENTRIES, np.uint64)
    weights = np.zeros(_MAX_WEIGHTS, np.int64)
    high = np.empty(_MAX_BLOCK + 3 * _GAP, np.uint8)
    rows = low.size // width
    if rows * width != low.size or out.size < (rows - 1) * pitch + width or pitch < width:
        return False
    done = 0
    tree = last = False
    while not last:
        if at + 3 > frame.size:
            return False
        head = _little(frame, at, 3)
        at += 3
        last = head & 1 == 1
        end = at + (head >> 3)
        if head >> 1 & 3 != 2 or end > frame.size or not 5 <= end - at <= largest:
            return False  # not a compressed block
        # The literals' header: whether they have a tree of their own, and two sizes.
        kind, form = int64(frame[at]) & 3, int64(frame[at]) >> 2 & 3
        if kind < 2 or form == 0:
            return False  # not Huffman-coded, or in one stream
        field = 6 + 4 * form
        sizes = _little(frame, at, 2 + form) >> 4
        count, size = sizes & ((1 << field) - 1), sizes >> field
        at += 2 + form
        stop = at + size
        if stop + 1 != end or frame[stop] != 0:
            return False  # sequences
        if count > min(largest, _MAX_BLOCK) or done + count > low.size:
            return False
        if kind == 2:
            used, found = _weights(frame, at, stop, weights)
            if used < 0 or not _tables(weights, found, single, several):
                return False
            tree = True
            at += used
        if not tree or not _streams(frame, at, stop, single, several, high, count):
            return False
        quarter = (count + 3) // 4
        for k in range(4):
            many = min(quarter, count - k * quarter)
            _place(low, high[k * (quarter + _GAP) :], out, done, many, width, pitch)
            done += many
        at = end
    return done == low.size and at == frame.size
