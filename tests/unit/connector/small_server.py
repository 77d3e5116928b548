"""A bare connector without an engine: scheduler half, worker half on a cache of random states, and outlet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.scheduler import SchedulerHalf
from hsx_dist.connector.worker import WorkerHalf
from tests.unit.connector.small_outlet import HIDDEN, LAYERS, outlet_on

BLOCK, BLOCKS = 4, 16


class SmallServer:
    """``store``: None for the folder ``path``. Two servers compute different states of the same prompt.

    ``points``: name → layers and width captured by taps, None for vLLM's extraction. ``caches``: by point.
    """

    def __init__(
        self,
        path: Any,
        store: Any = None,
        *,
        markers: Any = None,
        about: Any = None,
        points: Mapping[str, tuple[tuple[int, ...], int]] | None = None,
        **settings: Any,
    ):
        points = {"hidden_states": (LAYERS, HIDDEN)} if points is None else points
        captured = [CapturedPoint(name, layers, width, "float32") for name, (layers, width) in points.items()]
        self.caches = {p.name: torch.randn(BLOCKS, len(p.layers), BLOCK, p.width) for p in captured}
        self.outlet = outlet_on(path, store=store, markers=markers or store, locks=False, about=about, **settings)
        self.scheduler = SchedulerHalf(
            ConnectorConfig(output=str(path), allow_custom_save_path=True, **settings),
            block_size=BLOCK,
            tensor_parallel_size=1,
            points=captured,
        )
        self._worker = WorkerHalf(
            [(point, self.caches[point.name]) for point in captured],
            self.outlet,
            page_bytes=1 << 16,
            segment_bytes=1 << 18,
        )
        self._requests = 0

    def begin(
        self,
        prompt: list[int],
        *,
        salt: str | None = None,
        lora: str = "",
        images: Any = (),
        embeds: bool = False,
        **params: Any,
    ) -> Request:
        """Queue and schedule a request."""
        self._requests += 1
        extra = {"kv_transfer_params": {f"hidden_states_{name}": value for name, value in params.items()}}
        request = Request(
            request_id=f"r{self._requests}-{id(self):x}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=1, extra_args=extra),
            pooling_params=None,
            cache_salt=salt,
        )
        request.lora_request = SimpleNamespace(lora_name="adapter", lora_path=lora) if lora else None
        request.mm_features = [
            SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=at, length=1)) for at in images
        ]
        request.prompt_embeds = torch.zeros(len(prompt), HIDDEN) if embeds else None
        self.scheduler.new_request(request)
        self._step(request)
        return request

    def end(self, request: Request, *, computed: int | None = None) -> dict[str, Any]:
        """Finish it with ``computed`` tokens of its prompt (None: all). Returns its answer's meta."""
        n = len(request.prompt_token_ids)
        request.num_computed_tokens = n if computed is None else computed
        request.status = RequestStatus.FINISHED_ABORTED if computed is not None else RequestStatus.FINISHED_STOPPED
        _, answer = self.scheduler.request_finished(request, list(range(1, 1 - (-n // BLOCK))))
        self._step()
        return (answer or {}).get("hidden_states_meta", {})

    def ask(self, prompt: list[int], *, computed: int | None = None, **asked: Any) -> dict[str, Any]:
        """Run a whole request. Returns when it is stored or marked."""
        answer = self.end(self.begin(prompt, **asked), computed=computed)
        self.settle()
        return answer

    def settle(self) -> None:
        end = time.monotonic() + 30
        while self.outlet.pending or self._worker.pending:
            assert time.monotonic() < end
            self._step()
            time.sleep(0.002)

    def close(self) -> None:
        self.outlet.close(30)
        self._worker.close()

    def _step(self, *new: Request) -> None:
        meta = self.scheduler.build_meta(
            SimpleNamespace(
                total_num_scheduled_tokens=len(new),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=r.request_id, sampling_params=r.sampling_params) for r in new
                ],
            )
        )
        self._worker.begin(meta)
        self._worker.step(meta)
        self.scheduler.copies_done(self._worker.finished())
