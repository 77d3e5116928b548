"""The selected points are in the key of vLLM's compile cache, and unsuitable engines are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig, ParallelConfig, VllmConfig

from hsx_dist.errors import ConfigError
from hsx_dist.taps import capture_config
from hsx_dist.taps.capture_config import KEY, additional_config, capture_of, check_engine, embeds_first
from hsx_dist.taps.install import tap_model


def test_another_choice_has_another_key_in_the_compile_cache() -> None:
    choices: list[dict[str, Any]] = [{"points": {"q": [0]}}, {"points": {"q": [1]}}, {"preset": "full"}]
    keys = {VllmConfig(additional_config=additional_config(choice)).compute_hash() for choice in choices}
    assert len(keys | {VllmConfig().compute_hash()}) == 4


def test_a_table_without_a_trace_is_hashed_with_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``capture_of`` runs before an engine compiles. Another trace must not load the graphs of this one."""
    capture = {"points": {"q": [0]}}
    written = VllmConfig(additional_config=additional_config(capture)).compute_hash()
    given = VllmConfig(additional_config={KEY: {"capture": capture}})
    copied = VllmConfig(additional_config=given.additional_config)  # as for the decoder of a multimodal model
    assert given.compute_hash() != written
    assert capture_of(given) == capture
    assert given.compute_hash() == copied.compute_hash() == written
    monkeypatch.setattr(capture_config, "TRACE", capture_config.TRACE + 1)
    later = VllmConfig(additional_config={KEY: {"capture": capture}})
    assert capture_of(later) == capture
    assert later.compute_hash() != written


def test_the_choice_is_read_back() -> None:
    def read(table: Any) -> Any:
        return capture_of(SimpleNamespace(additional_config=table))

    assert read(additional_config({"preset": "full"})) == {"preset": "full"}
    assert read({}) is read({"other": 1}) is read(object()) is None
    with pytest.raises(ConfigError, match="same version of hsx_dist"):
        read({KEY: {"capture": {"preset": "full"}, "trace": 0}})
    for wrong in ({"points": {"q": [1]}}, {"capture": "full"}, "full"):
        with pytest.raises(ConfigError, match="expected a mapping with capture"):
            read({KEY: wrong})


def engine() -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(model="m", runner_type="generate", use_mla=False, is_hybrid=False, is_moe=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=None)),
        lora_config=None,
        speculative_config=None,
    )


def test_engines_that_fit() -> None:
    check_engine(engine())
    fits = engine()
    fits.speculative_config = SimpleNamespace(method="extract_hidden_states")
    fits.parallel_config.data_parallel_size = 2  # with a dense model, data-parallel engines are independent
    check_engine(fits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: vars(e.parallel_config).update(pipeline_parallel_size=2), "pipeline_parallel_size: expected 1"),
        (lambda e: vars(e.parallel_config).update(decode_context_parallel_size=2), "decode_context_parallel_size"),
        (lambda e: vars(e.parallel_config).update(prefill_context_parallel_size=2), "prefill_context_parallel_size"),
        (lambda e: vars(e.parallel_config).update(enable_hc_sp=True), "enable_hc_sp: expected False"),
        (lambda e: vars(e.parallel_config).update(enable_dbo=True), "enable_dbo: expected False"),
        (lambda e: vars(e.parallel_config).update(enable_eplb=True), "enable_eplb: expected False"),
        (lambda e: vars(e.compilation_config.pass_config).update(enable_sp=True), "enable_sp: expected False"),
        (lambda e: vars(e).update(lora_config=object()), "enable_lora: expected False"),
        (lambda e: vars(e.model_config).update(runner_type="pooling"), "runner: expected 'generate'"),
        (lambda e: vars(e.model_config).update(use_mla=True), "got MLA"),
        (lambda e: vars(e.model_config).update(is_hybrid=True), "got a hybrid model"),
        (lambda e: vars(e).update(speculative_config=SimpleNamespace(method="eagle3")), "got method 'eagle3'"),
        (
            lambda e: [vars(e.model_config).update(is_moe=True), vars(e.parallel_config).update(data_parallel_size=2)],
            "data_parallel_size: expected 1",
        ),
    ],
)
def test_engines_that_are_refused(change: Callable[[Any], None], message: str) -> None:
    one = engine()
    change(one)
    with pytest.raises(ConfigError, match=message):
        check_engine(one)


@pytest.mark.parametrize(
    ("embeds", "multimodal", "more", "first"),
    [
        (False, False, {}, False),
        (True, False, {}, True),
        (False, True, {}, True),
        (False, True, {"supports_multimodal_inputs": False}, False),
    ],
)
def test_engines_that_compute_embeddings_before_the_model(embeds, multimodal, more, first) -> None:  # type: ignore[no-untyped-def]
    config = SimpleNamespace(enable_prompt_embeds=embeds, is_multimodal_model=multimodal, **more)
    assert embeds_first(config) == first


def test_this_vllm_has_the_settings_that_are_refused() -> None:
    """If vLLM renamed a setting, it would not be refused any more."""
    found = VllmConfig()
    parallel = {f"{name}_parallel_size" for name in ("pipeline", "prefill_context", "decode_context", "data")}
    assert parallel | {"enable_dbo", "enable_eplb", "enable_hc_sp"} <= vars(found.parallel_config).keys()
    assert {"use_mla", "is_hybrid", "is_moe", "enable_prompt_embeds", "is_multimodal_model"} <= {*dir(ModelConfig)}
    # Other kinds of sequence parallelism: of experts, only with data parallelism, and a pass that vLLM has removed.
    several = ParallelConfig(
        tensor_parallel_size=2, data_parallel_size=1, enable_expert_parallel=True, distributed_executor_backend="mp"
    )
    assert not several.use_sequence_parallel_moe
    assert not [name for name in vars(found.compilation_config.pass_config) if "sp" in name.split("_")]


def test_a_model_is_tapped_once() -> None:
    """A second set of hooks would count every row twice on all taps, so their equal counts would hide it."""
    config = SimpleNamespace(additional_config=additional_config({"preset": "full"}))
    assert tap_model(SimpleNamespace(hsx_taps="its taps"), config) == "its taps"  # type: ignore[arg-type]
    assert tap_model(SimpleNamespace(), SimpleNamespace(additional_config={})) is None  # type: ignore[arg-type]
