"""One replica: a vLLM engine that a thread steps. It takes tasks, and ships pages through a sender. Needs no Ray."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import SecretStr

from hsx_dist.errors import EngineError, InputError
from hsx_dist.fleet.same_model import load_same_tokenizer, require_dtype, require_files
from hsx_dist.fleet.tasks import EngineSpec, Task, TaskResult
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.encode import Encoded, OutOfMemory, RowEncoder, TooLong
from hsx_dist.inputs.rows import Row
from hsx_dist.logger import get_logger
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.taps.capture_config import additional_config
from hsx_dist.text import text_of
from hsx_dist.transport.local_end import LocalEnd, register, unregister
from hsx_dist.transport.page_server import PageServer
from hsx_dist.transport.shipping import Shipped
from hsx_dist.working_folder import require_no_settings_of
from hsx_dist.writers.base import CALL_BYTES, Sender

log = get_logger(__name__)

#: Seconds that the loop sleeps if a step computed nothing (the ring is full, or the last copies are under way).
IDLE_S = 0.001


@dataclass(slots=True)
class RunningTask:
    """A task whose rows are in the engine or on the way to the writers."""

    task: Task
    result: TaskResult
    future: Future[TaskResult]
    open: set[str]  # keys that are not shipped, refused or skipped yet
    #: By key: for each reported column the reason why it is not stored, or None.
    columns: dict[str, dict[int, str | None]] = field(default_factory=dict)

    def ship(self, shipped: Shipped) -> bool:
        """Record one column of a sample. Return True once all columns of the sample are reported, by all ranks."""
        columns = self.columns.setdefault(shipped.key, {})
        columns[shipped.column] = shipped.reason
        if len(columns) < shipped.columns:
            return False
        del self.columns[shipped.key]
        self.open.discard(shipped.key)
        reason = next((why for why in columns.values() if why is not None), None)
        if reason is None:
            self.result.shipped.append(shipped.key)
        elif shipped.final:
            row = next(row for row in self.task.rows if row.key == shipped.key)
            self.refuse(row, "refused", reason)
        else:
            self.result.skipped.append((shipped.key, reason))
        return True

    def refuse(self, row: Row, fate: Literal["refused", "failed"], reason: str) -> None:
        """Record the outcome of a row that is not tried again."""
        self.result.refused.append(RowFate(row.key, row.row, fate, reason, self.task.tries, row.content))


class Replica:
    """Runs tasks on one engine. ``make_sender`` returns a sender for a worker rank.

    The engine runs in this process (one rank), in child processes (several ranks), or in actors of vLLM's Ray executor.
    A key is reported as shipped after the writers have got all of its pages.
    """

    def __init__(
        self, spec: EngineSpec, make_sender: Callable[[], Sender], meter: Meter | None = None, *, name: str = "0"
    ):
        """Start the engine, and block until it is ready.

        ``meter``: counters of engine and ring. ``name``: the replica's name in log lines of its ranks.

        Raises:
            EngineError: vLLM did not start. The message has vLLM's reason.
        """
        self._spec = spec
        self._name = name
        self.meter = Meter() if meter is None else meter
        self._increments = Increments(self.meter)
        self._senders: list[Sender] = []
        self._make_sender = make_sender
        self._inbox: queue.SimpleQueue[RunningTask | None] = queue.SimpleQueue()
        self._shipped: queue.SimpleQueue[Shipped] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._running: dict[str, RunningTask] = {}  # by key
        self._unanswered: dict[int, RunningTask] = {}  # tasks with an open future, by number
        self._lock = threading.Lock()  # between ``submit`` and the end of the loop
        backend = spec.engine_kwargs.get("distributed_executor_backend", "uni")
        self._in_process = spec.ranks == 1 and backend == "uni"
        # vLLM's Ray executor must start its ranks from the actor, to share its placement group. Started from a child
        # process, they would belong to another job.
        self._core_here = self._in_process or backend == "ray"
        self._end_here: LocalEnd | None = None
        self._server: PageServer | None = None
        self._engine: Any = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._requests = 0
        # Before the engine pins its thread: threads and processes inherit the cores of the thread that starts them.
        self._transport, self._address = self._open_transport()
        self._thread = threading.Thread(target=self._loop, name="hsx-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        self._raise_if_not_started()

    def _raise_if_not_started(self) -> None:
        if self._failure is not None:
            self._close_transport()
            raise EngineError(f"vLLM did not start: {text_of(self._failure)}") from self._failure

    # -- called by the owner -------------------------------------------------------------------------------------

    def submit(self, task: Task) -> Future[TaskResult]:
        """Queue a task. The future raises ``EngineError`` if the engine dies."""
        running = RunningTask(task, TaskResult(task.number), Future(), set())
        with self._lock:
            if self._failure is None:
                self._unanswered[task.number] = running
                self._inbox.put(running)
            else:
                running.future.set_exception(self._died())
        self._wake.set()
        return running.future

    def flush(self) -> None:
        """Block until the writers have taken all shipped pages."""
        for sender in list(self._senders):
            sender.flush()

    def close(self) -> None:
        """End the engine and the shipping threads. Tasks still running fail."""
        self._inbox.put(None)
        self._wake.set()
        # vLLM's client blocks forever on killed processes, so the wait for its thread has a limit.
        self._thread.join(timeout=None if self._failure is None else 10)
        self._close_transport()

    # -- transport -----------------------------------------------------------------------------------------------

    def _open_transport(self) -> tuple[str, str]:
        if self._in_process:
            self._end_here = LocalEnd(
                self._sender(),
                self._spec.in_flight_bytes,
                self._on_shipped,
                meter=self.meter,
                least_bytes=CALL_BYTES,
            )
            address = f"replica-{id(self)}"
            register(address, self._end_here)
            return "inline", address
        self._server = PageServer(self._sender, self._on_shipped, self._on_processes_ended, self.meter)
        return "attach", self._server.address

    def _close_transport(self) -> None:
        if self._end_here is not None:
            unregister(self._address)
            self._end_here.close()
        if self._server is not None:
            self._server.close()
        for sender in self._senders:
            sender.close()
        self._senders.clear()

    def _sender(self) -> Sender:
        sender = self._make_sender()
        self._senders.append(sender)
        return sender

    def _on_shipped(self, shipped: Shipped) -> None:
        self._shipped.put(shipped)
        self._wake.set()

    def _on_processes_ended(self) -> None:
        # On the shipping thread: the engine's thread may block on an answer of the dead processes.
        self._end(EngineError("the engine's processes ended. Look at their last log lines"))
        self._wake.set()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            with engine_environment(self._core_here):
                self._start()
        except BaseException as e:
            log.info("the engine did not start", exc_info=True)  # the constructor raises it
            self._failure = e
            self._shut_engine()  # it may have started, and be refused only then
            self._ready.set()
            return
        self._ready.set()
        try:
            while self._take_tasks():
                before = time.monotonic()
                self._step()
                self.meter.add("engine_seconds", time.monotonic() - before)
                self._take_shipped()
            self._end(EngineError("the replica was closed"))
        except BaseException as e:
            log.exception("the engine died")
            self._end(e)
        finally:
            self._shut_engine()

    def _shut_engine(self) -> None:
        if self._engine is not None:
            with contextlib.suppress(Exception):
                self._engine.engine_core.shutdown()

    def _start(self) -> None:
        require_no_settings_of("numba", ".numba_config.yaml")
        from vllm import LLM
        from vllm.exceptions import VLLMValidationError

        #: vLLM's errors for a bad request, after which the engine continues.
        self._refusals = (VLLMValidationError,)
        spec = self._spec
        try:
            params = self._sampling_params({})
        except (TypeError, ValueError, VLLMValidationError) as e:
            raise EngineError(f"sampling_params: expected arguments of vLLM's SamplingParams, got {e}") from e
        tokenizer = load_same_tokenizer(spec)
        key = self._server.key if self._server is not None else None
        llm = LLM(**engine_arguments(spec, self._transport, self._address, self._name, authkey=key))
        self._engine = llm.llm_engine
        engine = self._engine.vllm_config
        try:
            # vLLM checks this at each request too. There each row would be refused for a setting.
            params.verify(
                engine.model_config, engine.speculative_config, engine.structured_outputs_config, self._engine.tokenizer
            )
        except (ValueError, VLLMValidationError) as e:
            raise EngineError(f"sampling_params: expected those that this engine accepts, got {e}") from e
        require_files(spec)  # again: a trainer may have written a checkpoint while vLLM loaded
        if self._core_here and not self._in_process:
            # vLLM names these actors, with a random id that cannot be set.
            log.info("its ranks' actors are vllm_Worker_%s_TP0, …", self._engine.vllm_config.instance_id)
        require_dtype(spec, llm.model_config.dtype)
        # The engine's limit: the model's configuration alone does not determine it.
        longest = min(spec.max_tokens, llm.model_config.max_model_len - 1)
        if longest < spec.max_tokens and str(spec.engine_kwargs.get("max_model_len")) in ("-1", "auto"):
            raise EngineError(
                f"engine_kwargs.max_model_len: expected memory for {spec.max_tokens + 1} tokens, got memory for "
                f"{longest + 1}. Another replica would cut or refuse other rows. Set max_model_len to {longest + 1}"
            )
        self._encoder = RowEncoder(
            tokenizer, longest, spec.chat_template_kwargs, vocab_size=spec.vocab_size, rules=spec.rules
        )

    def _take_tasks(self) -> bool:
        while self._failure is None:
            try:
                running = self._inbox.get_nowait()
            except queue.Empty:
                if self._running:
                    return True
                self._wait("idle_seconds")
                continue
            if running is None:
                return False
            self._begin(running)
        return False

    def _begin(self, running: RunningTask) -> None:
        for row in running.task.rows:
            try:
                encoded = self._encoder.encode(row)
                self._add(row, encoded)
            except (InputError, ValueError, TypeError, *self._refusals) as e:
                running.refuse(row, fate_of(e, self._spec.rules.too_long), str(e))
                continue
            running.open.add(row.key)
            running.result.tokens += len(encoded.token_ids)
            self._running[row.key] = running
        self._settle(running)

    def _add(self, row: Row, encoded: Encoded) -> None:
        rules = self._spec.rules
        asked: dict[str, Any] = {
            "hidden_states_key": row.key,
            "hidden_states_row": row.row,
            "hidden_states_content": row.content,
            "include_output_tokens": rules.include_output_tokens,
        }
        if rules.select != "all":
            asked["hidden_states_tokens"] = rules.select
        if self._spec.capture is not None:
            asked["hidden_states_points"] = "all"
        if encoded.loss_mask is not None:
            asked["hidden_states_loss_mask"] = encoded.loss_mask
        if row.metadata:
            asked["hidden_states_metadata"] = row.metadata
        self._requests += 1
        params = self._sampling_params(asked, key=row.key)
        self._engine.add_request(f"r{self._requests}", {"prompt_token_ids": encoded.token_ids}, params)

    def _sampling_params(self, kv_transfer_params: dict[str, Any], key: str = "") -> Any:
        from vllm import SamplingParams

        # vLLM cannot sample zero tokens, so one is sampled. The user's parameters override these.
        params = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **self._spec.sampling_params}
        if self._spec.seed and self._spec.rules.include_output_tokens:
            params["seed"] = row_seed(self._spec.seed, key)
        extra = {**(params.pop("extra_args", None) or {}), "kv_transfer_params": kv_transfer_params}
        return SamplingParams(**params, extra_args=extra)

    def _step(self) -> None:
        if self._engine.has_unfinished_requests() or (self._core_here and self._running):
            # Only this loop steps an engine in this process, and the copies of the last requests need further steps.
            outputs = self._engine.step()
            if outputs or self._engine.has_unfinished_requests():
                return
        elif not self._running:
            return
        self._wait("store_wait_seconds", IDLE_S if self._core_here else None)

    def _wait(self, counted_as: str, timeout: float | None = None) -> None:
        before = time.monotonic()
        self._wake.wait(timeout)
        self._wake.clear()
        self.meter.add(counted_as, time.monotonic() - before)

    def _take_shipped(self) -> None:
        while True:
            try:
                shipped = self._shipped.get_nowait()
            except queue.Empty:
                return
            running = self._running.get(shipped.key)
            if running is not None and running.ship(shipped):
                del self._running[shipped.key]
                self._settle(running)

    def _settle(self, running: RunningTask) -> None:
        if not running.open and self._unanswered.pop(running.task.number, None) is not None:
            running.result.numbers = self._increments.counters()
            running.future.set_result(running.result)

    def _died(self) -> EngineError:
        return EngineError(f"the engine died: {text_of(self._failure)}")

    def _end(self, why: BaseException) -> None:
        """Fail all open tasks, and every later one, with the reason."""
        with self._lock:
            self._failure = self._failure or why
            unanswered, self._unanswered = self._unanswered, {}
        for running in unanswered.values():
            running.future.set_exception(self._died())


def fate_of(error: Exception, too_long: str) -> Literal["refused", "failed"]:
    """Return the outcome of a row that cannot be encoded. A resume tries a failed row again."""
    failed = isinstance(error, OutOfMemory) or (isinstance(error, TooLong) and too_long == "fail")
    return "failed" if failed else "refused"


def row_seed(run: str, key: str) -> int:
    """Return the sampling seed of a row, 0 to 2^63 - 1. It depends only on the run's seed and the row's key."""
    digest = hashlib.blake2b(f"{run}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def engine_arguments(
    spec: EngineSpec, transport: str, address: str, replica: str = "0", *, authkey: bytes | None = None
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``: the user's, unchanged, and those of the extraction.

    ``authkey``: key for the socket at ``address``. vLLM's log lines do not show it."""
    arguments: dict[str, Any] = {"disable_log_stats": True, **spec.engine_kwargs}
    if spec.revision is not None:
        arguments["revision"] = spec.revision
    if transport == "inline":
        arguments["distributed_executor_backend"] = "uni"
    return {
        **arguments,
        "model": spec.model,
        **_captures(spec),
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "hsx_dist.connector.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "hsx": {
                    "transport": transport,
                    "address": address,
                    "replica": replica,
                    "output": spec.output,
                    "layout": spec.layout,
                    "codec": spec.codec,
                    "segment_bytes": spec.segment_bytes,
                    "page_bytes": spec.page_bytes,
                    "in_flight_bytes": spec.in_flight_bytes,
                    **({} if spec.owners is None else {"owners": spec.owners}),
                    **({} if authkey is None else {"authkey": SecretStr(authkey.hex())}),
                }
            },
        },
    }


def _captures(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments with which the engine captures."""
    if spec.capture is not None:
        user = spec.engine_kwargs.get("additional_config") or {}
        return {"additional_config": {**user, **additional_config(dict(spec.capture))}}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layers)}},
        }
    }


@contextlib.contextmanager
def engine_environment(in_process: bool) -> Iterator[None]:
    """Set the variables that vLLM reads when an engine is made: the core's process, and the size of a CPU cache."""
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # By default a CPU engine takes nearly all of the machine's memory. A GPU engine ignores the variable.
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
        changes["VLLM_CPU_KVCACHE_SPACE"] = str(max(gib // 16, 1))
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
