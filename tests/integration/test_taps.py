"""Every point of real vLLM engines against transformers with hooks, in float32.

Rows are read twice: from the paged cache by the block tables when the scheduler frees them, and from the pages that the
connector ships.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from hsx_dist.connector import plugin
from hsx_dist.connector.flush import flush
from hsx_dist.errors import EngineError
from hsx_dist.page import Page
from hsx_dist.taps import operator
from hsx_dist.taps.capture_config import additional_config
from hsx_dist.taps.points import POINTS
from hsx_dist.transport.local_end import LocalEnd, register, unregister
from hsx_dist.vllm_patches.model_loads import taps_of
from tests.harness.gpu_defaults import check_defaults
from tests.harness.hooked_model import HookedModel, tiny_model, worst_row
from tests.integration.exact import prompts

BLOCK, CHUNK, MAX_LEN = 32, 64, 256
LAYERS = [0, 2, -1]  # the first, a middle and the last
TOLERANCE = 2e-5  # of the worst row; the engines' differences are below 5e-6

#: All models run in both modes with HSX_ALL_TAPS=1. These two have every point. The dense model compiles, because
#: graphs of experts take twice the time.
ENGINES = (
    [(kind, mode) for mode in ("eager", "compiled") for kind in ("llama", "qwen3", "qwen3_moe", "mixtral")]
    if os.environ.get("HSX_ALL_TAPS")
    else [("qwen3_moe", "eager"), ("llama", "compiled")]
)
#: Mutations use these, so they come first: a compiled engine would keep the traced code.
EAGER = [engine for engine in ENGINES if engine[1] == "eager"]
mutates = pytest.mark.parametrize("tapped", EAGER, ids="-".join, indirect=True)


def choice(kind: str) -> dict[str, Any]:
    """Every point that the model has."""
    layers: dict[str, Any] = {name: LAYERS if p.per_layer else "all" for name, p in POINTS.items()}
    lacking = {"q_norm", "k_norm"} if kind in ("llama", "mixtral") else set()
    lacking |= {"mlp_post"} if kind == "mixtral" else set()
    if kind in ("llama", "qwen3"):
        lacking |= {"router_logits", "topk_ids", "topk_weights"}
    if kind == "qwen3_moe":
        layers["mlp_post"] = 1  # its second layer is dense
    return {"points": {name: of for name, of in layers.items() if name not in lacking}}


class ShippedRows:
    """A ``Sender`` that keeps copies of pages."""

    def __init__(self) -> None:
        self.pages: list[tuple[Page, Any]] = []

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        for page in pages:
            self.pages.append((page, page.data.copy()))
            release(page)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def chosen(self, key: str = "") -> set[tuple[str, tuple[int, ...]]]:
        """The shipped points and layers, of one request or of all."""
        return {(page.segment.point, page.layer_ids) for page, _ in self.pages if key in ("", page.segment.key)}

    def rows(self, key: str, n: int) -> dict[tuple[str, int], torch.Tensor]:
        """The ``n`` rows of every point and layer of a sample. Each must be shipped once."""
        found: dict[tuple[str, int], torch.Tensor] = {}
        mine = [(page, data) for page, data in self.pages if page.segment.key == key]
        columns = {page.segment.column for page, _ in mine}
        assert columns == set(range(mine[0][0].segment.columns))
        for page, data in mine:
            segment = page.segment
            assert (segment.total, segment.shards, page.error) == (n, 1, "")
            values = torch.from_numpy(data.view(page.dtype)).reshape(page.shape)
            values = values if page.order == "LTH" else values.transpose(0, 1)
            for i, layer in enumerate(page.layer_ids):
                rows = found.setdefault((segment.point, layer), torch.full((n, page.hidden_size), -(2**30)).double())
                assert (rows[page.start : page.stop] == -(2**30)).all()
                rows[page.start : page.stop] = values[i, : page.num_tokens].double()
        return found


class Tapped:
    """An engine without speculation. Its points are read when the scheduler frees a request's blocks."""

    def __init__(self, kind: str, mode: str, folder: Path, patch: pytest.MonkeyPatch):
        from vllm import LLM
        from vllm.config import CompilationMode
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        plugin.register()
        model = tiny_model(kind, folder / kind)
        self.hooked = HookedModel(model)
        self.read: dict[tuple[int, ...], dict[tuple[str, int], torch.Tensor]] = {}
        self.preemptions = self.requests = 0
        free, preempt = KVCacheManager.free, Scheduler._preempt_request

        def read_and_free(manager: Any, request: Any) -> None:
            n = request.num_computed_tokens
            (blocks,) = manager.get_block_ids(request.request_id)
            self.read[tuple(request.all_token_ids[:n])] = self._rows(blocks, n)
            free(manager, request)

        def count_and_preempt(*args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            preempt(*args, **kwargs)

        patch.setattr(KVCacheManager, "free", read_and_free)
        patch.setattr(Scheduler, "_preempt_request", count_and_preempt)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if mode == "compiled":
            patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        self.shipped = ShippedRows()
        self.end = LocalEnd(self.shipped, 1 << 20)
        register("taps", self.end)
        self.llm = LLM(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=CHUNK,
            block_size=BLOCK,
            enforce_eager=mode == "eager",
            num_gpu_blocks_override=17,  # room for two of the longest requests
            additional_config=additional_config(choice(kind)),
            kv_transfer_config={
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": "hsx_dist.connector.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "hsx": {
                        "transport": "inline",
                        "address": "taps",
                        "output": "memory://taps",
                        "layout": "part",
                        "in_flight_bytes": 1 << 20,
                        "page_bytes": 1 << 15,
                        "segment_bytes": 1 << 16,
                    }
                },
            },
            disable_log_stats=True,
        )
        (self.taps,) = self.llm.apply_model(taps_of)
        check_defaults(self.llm.llm_engine.vllm_config)
        compiled = self.llm.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE
        assert compiled == (mode == "compiled")

    def _rows(self, blocks: list[int], n: int) -> dict[tuple[str, int], torch.Tensor]:
        return {
            (point, layer): cache.kv_cache[blocks, at].reshape(-1, cache.kv_cache.shape[3])[:n].clone()
            for point, cache in self.taps.caches.items()
            for at, layer in enumerate(cache.layers)
        }

    def sampling(self, new_tokens: int, asked: dict[str, Any]) -> Any:
        """Parameters for all points and generated tokens, changed by ``asked``."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=new_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"include_output_tokens": True, "hidden_states_points": "all", **asked}},
        )

    def run(self, wanted: list[list[int]], new_tokens: int = 1, *asked: dict[str, Any]) -> list[Any]:
        """Generate, and compare every row of every point. Returns vLLM's outputs.

        ``asked``: parameters of each request, or one for all.
        """
        self.read.clear()
        self.shipped.pages.clear()
        given = asked if len(asked) == len(wanted) else [*asked, {}][:1] * len(wanted)
        sampling = [
            self.sampling(new_tokens, {"hidden_states_key": f"r{self.requests + i}", **one})
            for i, one in enumerate(given)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in wanted], sampling, use_tqdm=False)
        flush(self.llm)
        for i, (prompt, output) in enumerate(zip(wanted, outputs, strict=True)):
            token_ids = [*prompt, *output.outputs[0].token_ids][:-1]
            self.compare(token_ids, self.read[tuple(token_ids)])
            if given[i].get("hidden_states_save", True):
                self.compare(token_ids, self.shipped.rows(f"r{self.requests + i}", len(token_ids)))
        self.requests += len(wanted)
        return outputs

    def compare(self, token_ids: list[int], got: dict[tuple[str, int], torch.Tensor]) -> None:
        expected = self.hooked.rows(token_ids)
        for (point, layer), rows in got.items():
            error = worst_row(rows, expected[point, layer])
            assert error < TOLERANCE, (point, layer, error)


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def tapped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tapped]:
    with pytest.MonkeyPatch.context() as patch:
        engine = Tapped(*request.param, tmp_path_factory.mktemp("taps"), patch)
        try:
            yield engine
        finally:
            engine.llm.llm_engine.engine_core.shutdown()
            unregister("taps")
            engine.end.close()
            torch.compiler.reset()


def test_every_point_of_every_request(tapped: Tapped) -> None:
    """Short and chunked prompts, prefix hits, generated tokens, and preempted requests."""
    before = tapped.taps.check_alive()
    tapped.run(prompts(1, 1, 31, 33, 200))
    assert tapped.taps.check_alive() == before + 265
    (long,) = prompts(2, 100)
    tapped.run([long])
    (hit,) = tapped.run([[*long[:96], 7, 8, 9]])
    assert hit.num_cached_tokens == 96
    tapped.run(prompts(3, 5, 40), new_tokens=40)
    tapped.run(prompts(4, 60, 65, 70, 75, 80, 85), new_tokens=90)
    assert tapped.preemptions
    tapped.taps.check_alive()


def test_a_request_chooses_points_and_others_share_its_batch(tapped: Tapped) -> None:
    (asked,) = tapped.run(prompts(8, 50), 1, {"hidden_states_points": {"q": [2], "ln2": "all"}})
    assert tapped.shipped.chosen() == {("q", (2,)), ("ln2", (0, 2, 4))}
    told = asked.kv_transfer_params["hidden_states_meta"]["points"]
    assert told["q"] == {"shape": [50, 1, 128], "dtype": "float32", "layer_ids": [2]}
    (states,) = tapped.run(prompts(9, 50), 1, {"hidden_states_points": None})
    assert tapped.shipped.chosen() == {("hidden_states", (0, 2, 5))}
    assert states.kv_transfer_params["hidden_states_meta"]["layer_ids"] == [0, 2, 5]
    (refused,) = tapped.run(prompts(10, 50), 1, {"hidden_states_points": {"q": [1]}})
    assert "captured layers" in refused.kv_transfer_params["hidden_states_meta"]["refused"]["hidden_states_points"]


def test_requests_of_one_batch_choose_other_points(tapped: Tapped) -> None:
    first = tapped.requests
    asked = ({"q": [2]}, {"z": [0], "mlp_out": "all"}, "all", {"q": [0, 2]})
    given = [{"hidden_states_points": points} for points in asked]
    tapped.run(prompts(60, 20, 30, 9, 14, 12), 3, *given, {"hidden_states_save": False})
    assert tapped.shipped.chosen(f"r{first}") == {("q", (2,))}
    assert tapped.shipped.chosen(f"r{first + 1}") == {("z", (0,)), ("mlp_out", (0, 2, 4))}
    assert len(tapped.shipped.chosen(f"r{first + 2}")) == len(tapped.taps.plan.points)
    assert tapped.shipped.chosen(f"r{first + 3}") == {("q", (0, 2))}
    assert not tapped.shipped.chosen(f"r{first + 4}")


@pytest.mark.parametrize("steps", [1, 6])
def test_an_aborted_request_has_all_points_of_its_computed_tokens_or_none(tapped: Tapped, steps: int) -> None:
    """During its chunked prefill, and during decode."""
    tapped.read.clear()
    tapped.shipped.pages.clear()
    (prompt,), key = prompts(13 + steps, 150), f"aborted-{steps}"
    engine = tapped.llm.llm_engine
    engine.add_request(key, {"prompt_token_ids": prompt}, tapped.sampling(40, {"hidden_states_key": key}))
    for _ in range(steps):
        outputs = engine.step()
    engine.abort_request([key])
    flush(tapped.llm)
    if steps == 1:
        assert not tapped.shipped.pages
        return
    token_ids = [*prompt, *outputs[0].outputs[0].token_ids]
    n = tapped.shipped.pages[0][0].segment.total
    assert len(prompt) < n <= len(token_ids)
    tapped.compare(token_ids[:n], tapped.shipped.rows(key, n))


def test_every_point_is_captured(tapped: Tapped) -> None:
    plan = tapped.taps.plan
    assert plan.aliases == {"mlp_in": "ln2"}
    assert plan.points["q"] == (0, 2, 4)
    assert len(tapped.llm.llm_engine.vllm_config.compilation_config.static_forward_context) >= len(plan.points) + 5


@pytest.fixture
def mutable(tapped: Tapped) -> Iterator[Tapped]:
    """The counters are equal again after the test."""
    yield tapped
    for count in tapped.taps.counts.values():
        count.zero_()


@mutates
@pytest.mark.parametrize("point", ["resid_pre", "z", "mlp_out"])
def test_a_layer_shifted_by_one_is_seen(mutable: Tapped, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [number for (name, _), number in mutable.taps.numbers.items() if name == point]
    for number, other in zip(numbers, [int(n) for n in (*numbers[1:], numbers[0])], strict=True):
        monkeypatch.setattr(number, "data", torch.tensor([other]))
    with pytest.raises(AssertionError, match=point):
        mutable.run(prompts(50 + len(point), 40))  # new prompts: a prefix hit would return the last test's rows


@mutates
def test_transposed_heads_are_seen(mutable: Tapped, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = operator.scatter

    def transposed(x: torch.Tensor, *args: torch.Tensor) -> None:
        if x.shape[1] == 128:  # q and z
            x = x.reshape(-1, 4, 32).flip(1).reshape(-1, 128)
        scatter(x, *args)

    monkeypatch.setattr(operator, "scatter", transposed)
    with pytest.raises(AssertionError, match="'q', 0"):
        mutable.run(prompts(6, 40))


@mutates
def test_a_dead_tap_is_seen_by_its_rows_and_ends_the_running_engine(
    mutable: Tapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = get_kv_transfer_group()._taps
    monkeypatch.setattr(watch, "_next", math.inf)
    (module,) = mutable.llm.apply_model(lambda model: model.model.layers[0].self_attn.o_proj)
    monkeypatch.setattr(module, "_forward_hooks", type(module._forward_hooks)())
    with pytest.raises(AssertionError, match="'attn_out', 0"):
        mutable.run(prompts(7, 40))
    monkeypatch.setattr(watch, "_next", 0.0)  # as after ten seconds
    with pytest.raises(EngineError, match=r"got another number from attn_out of layer 0 \("):
        mutable.run(prompts(12, 40))
