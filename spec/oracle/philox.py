# SPDX-License-Identifier: BSD-3-Clause
"""Philox4x32-10 (Salmon et al., SC 2011), written from the paper. `check` compares it with the known answers of the
authors' library Random123.
"""
import numpy as np

LOW = np.uint64(0xFFFFFFFF)


def draw(key, low, high):
    """Returns uint32 [n, 4] for the counters low [n] and high [n] (or one number), uint64. The whole counter is low
    | high << 64."""
    low = np.asarray(low, dtype=np.uint64)
    high = np.broadcast_to(np.asarray(high, dtype=np.uint64), low.shape)
    c = [low & LOW, low >> np.uint64(32), high & LOW, high >> np.uint64(32)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & LOW, (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
             p0 & LOW]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def unit(words):
    """Returns 24 bits of each word as a number in [0, 1)."""
    return (words >> np.uint64(8)).astype(np.float64) * 2.0 ** -24


def check():
    ones = 0xFFFFFFFFFFFFFFFF
    for key, low, high, known in (
            (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            (ones, ones, ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
            (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E,
             (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))):
        got = tuple(int(w) for w in draw(key, np.array([low], dtype=np.uint64), high)[0])
        assert got == known, "philox: %s, not %s" % (["%08x" % w for w in got], ["%08x" % w for w in known])


check()
