"""Whether a CPU has AMX."""

from __future__ import annotations

import pytest

from hsx_dist.isa import has_amx

FLAGS = "flags\t\t: fpu avx512_fp16 amx_bf16 amx_tile amx_int8\n"


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("cpuid level\t: 28\n" + FLAGS, True),
        ("cpuid level\t: 32\n" + FLAGS, True),
        ("cpuid level\t: 22\nflags\t\t: fpu avx512_bf16\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),
    ],
)
def test_amx_is_seen_in_the_flags(cpuinfo: str, has: bool) -> None:
    assert has_amx(cpuinfo) is has
