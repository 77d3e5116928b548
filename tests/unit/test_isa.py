"""A CPU that claims AMX without describing it."""

from __future__ import annotations

import pytest

from hsx_dist.isa import amx_is_broken

FLAGS = "flags\t\t: fpu avx512_fp16 amx_bf16 amx_tile amx_int8\n"


@pytest.mark.parametrize(
    ("cpuinfo", "broken"),
    [
        ("cpuid level\t: 28\n" + FLAGS, True),
        ("cpuid level\t: 32\n" + FLAGS, False),
        ("cpuid level\t: 22\nflags\t\t: fpu avx512_bf16\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),
    ],
)
def test_amx_is_broken_where_cpuid_ends_before_its_leaf(cpuinfo: str, broken: bool) -> None:
    assert amx_is_broken(cpuinfo) is broken
