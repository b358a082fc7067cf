"""The libraries' functions, called as they want to be: stand-ins for them give what the oracle gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cbatch_kernels.attention_libraries import LIBRARIES, FlashInfer

from tests.kernels.attention_stand_ins import FLASH_ATTN, FLASHINFER
from tests.kernels.oracle import TOLERANCE, Variant, attend, build_case

CPU = torch.device("cpu")
MODULES = {"flash_attn": FLASH_ATTN, "flashinfer": FLASHINFER}
MIXED = [(1, 1), (1, 17), (1, 40), (5, 5), (7, 33), (19, 19)]


@pytest.mark.parametrize("lens", [MIXED, MIXED[:3], MIXED[3:]], ids=["mixed", "single", "prompts"])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant(num_heads=9, kv_heads=3, page_size=5),
        Variant(sliding_window=7),
        Variant(softcap=2.0),
        Variant(dtype=torch.bfloat16),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", MODULES)
def test_a_library_is_asked_for_what_ours_computes(name: str, variant: Variant, lens: list[tuple[int, int]]) -> None:
    case = build_case(variant, lens, padding=2)
    finite = replace(case, key_pages=case.key_pages.nan_to_num(), value_pages=case.value_pages.nan_to_num())
    result = LIBRARIES[name].adapt(MODULES[name], CPU)(
        case.query,
        finite.key_pages,
        finite.value_pages,
        case.metadata,
        scaling=variant.scaling,
        sliding_window=variant.sliding_window,
        softcap=variant.softcap,
    )
    tolerance = TOLERANCE[variant.dtype]
    torch.testing.assert_close(result[:-2].double(), attend(finite, variant), atol=tolerance, rtol=tolerance)
    assert not result[-2:].any()


def test_flashinfer_plans_once_a_step_for_each_kind_of_layer() -> None:
    variant = Variant()
    first, second = (build_case(variant, MIXED, seed=seed) for seed in (0, 1))
    ours = FlashInfer(FLASHINFER, CPU)
    for case in (first, second):
        for _ in range(3):
            for window in (None, 8):
                ours(case.query, case.key_pages, case.value_pages, case.metadata, scaling=1.0, sliding_window=window)
    assert [wrapper.num_plans for wrapper in ours._wrappers.values()] == [2, 2]
