"""Bad rows are detected in every dtype, and good rows are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hsx_dist.page import CARRIER, Page, Segment
from hsx_dist.writers.sanity_checks import SanityChecks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def page_of(values: torch.Tensor, order: str = "LTH") -> Page:
    """``values``: ``[L, T, H]``."""
    layers, n, _ = values.shape
    dtype = str(values.dtype).removeprefix("torch.")
    data = values.contiguous() if order == "LTH" else values.permute(1, 0, 2).contiguous()
    width = torch.int32 if dtype == "float32" else torch.int16
    carrier = data.view(width).numpy().view(CARRIER[dtype])
    return Page(
        Segment("k", 0, 0, n, n),
        0,
        n,
        n,
        tuple(range(layers)),
        dtype,
        carrier.shape,
        order,
        np.arange(n, dtype=np.int64),
        carrier,
    )


def scan(*pages: Page):
    found = SanityChecks.empty(len(pages[0].layer_ids))
    for page in pages:
        for i in range(len(page.layer_ids)):
            found.look(page.dtype, i, page.layer(i))
    return found.findings(pages[0].layer_ids)


@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_rows_are_counted_by_layer(dtype, order):
    values = torch.randn(3, 20, 16).to(DTYPES[dtype])
    assert scan(page_of(values, order)) == {}
    values[1, 3, 5] = float("nan")
    values[1, 4, 0] = float("inf")
    values[2, 19, 15] = float("-inf")
    values[2, 19, 14] = -values[2, 0, 0].abs() * float("nan")
    assert scan(page_of(values, order)) == {"nonfinite_rows": {"1": 2, "2": 1}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_zero_only_if_all_of_its_pages_are(dtype):
    zeros = torch.zeros(2, 4, 8).to(DTYPES[dtype])
    signed = zeros.clone()
    signed[0, 1] = -0.0
    assert scan(page_of(zeros), page_of(signed)) == {"zero_layers": [0, 1]}
    one = zeros.clone()
    one[1, 3, 7] = -torch.finfo(DTYPES[dtype]).tiny
    assert scan(page_of(zeros), page_of(one)) == {"zero_layers": [0]}


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.uint16, (2, 5, 3), elements=st.integers(0, 0xFFFF)), st.sampled_from(["bfloat16", "float16"]))
def test_the_scan_equals_torch_for_any_bits(bits, dtype):
    values = torch.from_numpy(bits.view(np.int16)).view(DTYPES[dtype])
    found = scan(page_of(values))
    bad = (~torch.isfinite(values.float())).any(-1).sum(-1).tolist()
    assert found.get("nonfinite_rows", {}) == {str(i): n for i, n in enumerate(bad) if n}
    zero = [i for i in range(2) if not values[i].float().ne(0).any()]
    assert found.get("zero_layers", []) == zero
