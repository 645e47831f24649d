"""The CRC-32 of two strings of bytes together, from those of each, so that one pass over the bytes gives several sums.

A CRC-32 is a polynomial over GF(2) modulo a fixed one, and n bytes more multiply it by x**(8 n). That is linear in its
32 bits, so a table for each power of two of n does it.
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320  # of zlib, bits reversed

_Table = tuple[tuple[int, ...], ...]


def joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of A + B from those of A and B.

    Args:
        first, second: of A and B.
        length: bytes of B.
    """
    power = 0
    while length:
        if length & 1:
            low, second_byte, third_byte, high = _table(power)
            first = low[first & 255] ^ second_byte[first >> 8 & 255] ^ third_byte[first >> 16 & 255] ^ high[first >> 24]
        length >>= 1
        power += 1
    return first ^ second


@cache
def _table(power: int) -> _Table:
    """What each value of each of the four bytes of a checksum becomes by appending 2**power zero bytes."""
    columns = [_appended(1 << bit, power) for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0] * 256
        for value in range(1, 256):
            lowest = value & -value
            table[value] = table[value ^ lowest] ^ columns[8 * byte + lowest.bit_length() - 1]
        tables.append(tuple(table))
    return tuple(tables)


def _appended(checksum: int, power: int) -> int:
    if power == 0:
        for _ in range(8):
            checksum = checksum >> 1 ^ (_POLYNOMIAL if checksum & 1 else 0)
        return checksum
    half = 1 << (power - 1)
    return joined(joined(checksum, 0, half), 0, half)
