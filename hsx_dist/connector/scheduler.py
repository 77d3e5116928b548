"""Scheduler half of the connector: selects the requests to store, names their objects and holds their cache blocks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from hsx_dist.connector.columns import CapturedPoint, columns_of
from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.failure_markers import used_before
from hsx_dist.connector.metadata import StepMetadata
from hsx_dist.connector.request_identity import inputs_of, request_hash, too_long
from hsx_dist.connector.request_params import OURS, RequestParams, own_id, read_request_params
from hsx_dist.connector.step import Expect, Save, Skip
from hsx_dist.connector.token_selection import Chosen, choose
from hsx_dist.connector.worker_params import withhold_from_workers
from hsx_dist.format.identity import IDENTITY, identity_hash
from hsx_dist.logger import get_logger
from hsx_dist.page import HIDDEN_STATES, object_name, token_hash
from hsx_dist.text import bounded, shown_error

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = get_logger(__name__)

#: Number of client-chosen keys whose sample is remembered, to detect a key that is used again for other tokens. Also
#: the number of names whose storing rank is remembered.
REMEMBERED_KEYS = 65536


@dataclass(slots=True)
class _Claim:
    """The sample that a key belongs to (``format.identity``).

    ``request``: hash of the request. ``tokens``: hash of the computed tokens, set when a sample is passed to a worker.
    ``users``: number of unfinished requests with the key.
    """

    request: str
    tokens: str | None = None
    users: int = 0


@dataclass(slots=True)
class _KnownRequest:
    """An unfinished request. ``owner`` is chosen when it is first scheduled. ``request``: its hash, if the client chose
    the name."""

    options: RequestParams
    request: str = ""
    owner: int | None = None
    claim: _Claim | None = None
    conflict: str | None = None  # why its key is refused; a worker gets this at admission
    error: str | None = None  # why the request was not admitted


class SchedulerHalf:
    """State of the connector in the scheduler's process."""

    def __init__(
        self,
        settings: ConnectorConfig,
        *,
        block_size: int,
        tensor_parallel_size: int,
        points: Sequence[CapturedPoint] = (),
    ):
        """``points``: the captured points; empty if the workers report them later (``capture``)."""
        self._settings = settings
        self._block_size = block_size
        self._ranks = tensor_parallel_size
        self.capture(points)
        self._next = StepMetadata()
        self._sequence = 0
        self._known: dict[str, _KnownRequest] = {}
        #: Requests whose blocks are held: ``request_finished`` returned True, and not all ranks have reported the copy.
        self._held: set[str] = set()
        self._claims: OrderedDict[str, _Claim] = OrderedDict()  # by object name: a key may be long
        self._owner_of: OrderedDict[str, int] = OrderedDict()  # by ``object_name`` of a client-chosen name
        self._warned: set[str] = set()
        self._loaded: str | None = None  # why this engine stores no more samples

    def capture(self, points: Sequence[CapturedPoint]) -> None:
        """Set the points that the workers capture. Must be called before the first request."""
        self._points = {point.name: point for point in points}
        self._captured = {point.name: point.layers for point in points}

    # -- a request's life ----------------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Admit a request when vLLM queues it. Idempotent, although no known vLLM release calls it twice."""
        if request.request_id not in self._known:
            self._known[request.request_id] = self._admitted(request)

    def _admitted(self, request: Request) -> _KnownRequest:
        """Read a request's parameters. On an error nothing is stored for it; an exception would end the engine."""
        options = RequestParams(own := own_id(request.request_id), own)
        try:
            options = self._read(request)
            return self._admit(request, options)
        except Exception as e:
            log.exception("parameters of request %s cannot be read", options.id)
            why = bounded(f"the request's parameters cannot be read: {shown_error(e)}")
            return _refused(options, why)

    def _admit(self, request: Request, options: RequestParams) -> _KnownRequest:
        if options.save and request.resumable:
            # vLLM extends its prompt and its images later. The loss mask and the identity would be of the first part.
            return _refused(options, "expected a request in one part, got an input stream. Send all tokens at once")
        if options.save and (why := too_long(request)):
            return _refused(options, why)
        if options.save and not self._points:
            return _refused(options, "expected captured points from the workers, got none. Check the workers' log")
        # In a job, ids of rows are unique, and a row that is computed again may have other generated tokens.
        # ``sample_hash`` distinguishes the computations.
        if not options.chosen or not options.save or not self._settings.bare:
            return _KnownRequest(options)
        known = _KnownRequest(options, request_hash(request, options))
        key, name = options.key, options.name
        if options.path is not None or not request.prompt_token_ids or request.prompt_embeds is not None:
            return known  # a path's object is replaced, as by vLLM's connector; nothing is stored without token ids
        if known.options.by_path and name not in self._claims:
            # Programs for vLLM's connector delete an object and use its path again, so paths claim no key. Objects of
            # such paths are stored by put-if-absent, so that no object is replaced.
            return known
        claim = self._claims.setdefault(name, _Claim(known.request))
        self._claims.move_to_end(name)
        if len(self._claims) > REMEMBERED_KEYS:
            self._claims.popitem(last=False)
        if claim.request != known.request:
            known.conflict = used_before(key)
            # Sent with the next step, before the first token: a reader with the answer must find the marker.
            self._queue_skip(known, known.conflict, conflict=True)
        else:
            known.claim = claim
            claim.users += 1
        return known

    def _read(self, request: Request) -> RequestParams:
        s = self._settings
        options = read_request_params(
            request.request_id,
            request.kv_transfer_params,
            prompt_tokens=len(request.prompt_token_ids or ()),
            captured=self._captured,
            output=s.output,
            allow_custom_path=s.allow_custom_save_path and s.one_object,
            include_output_tokens=s.include_output_tokens,
        )
        for name, why in options.refused.items():
            # One warning for each known name, and one for all unknown names: a client may send a million of those.
            kind = name if name in OURS else "another"
            if kind not in self._warned:
                self._warned.add(kind)
                log.warning("kv_transfer_params[%r] of request %s is ignored: %s", name, options.id, why)
        return options

    def _owner(self, known: _KnownRequest) -> int:
        """Return the owner number of a request, from which ``Ranks.owns`` computes the storing rank.

        Ranks take turns, but a client-chosen name always has the same rank. Only that rank knows the order of the
        name's requests, which of them are in flight, and whether its marker reports a conflict.
        """
        if known.owner is None:
            name = object_name(known.options.name)  # a path may be long
            known.owner = self._owner_of.get(name)
            if known.owner is None:
                known.owner = self._sequence % self._ranks
                self._sequence += 1
            if known.options.chosen and self._ranks > 1:
                self._owner_of[name] = known.owner
                self._owner_of.move_to_end(name)
                if len(self._owner_of) > REMEMBERED_KEYS:
                    self._owner_of.popitem(last=False)
        return known.owner

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Handle a finished request; vLLM calls this once for each, for every finish reason.

        The computed tokens decide whether the request is complete, not its status: vLLM aborts a request both for a
        stop string and for a client that disconnects.
        """
        known = self._known.pop(request.request_id, None) or self._admitted(request)
        try:
            held, answer = self._finish(known, request, block_ids)
        except Exception as e:
            # An exception would end the engine's step. Blocks that are not held must not be copied.
            log.exception("hidden states of request %s cannot be saved", known.options.id)
            self._held.discard(request.request_id)
            self._next.saves = [s for s in self._next.saves if s.request_id != request.request_id]
            held, answer = False, None
            with suppress(Exception):  # the same values may have caused the first error
                held, answer = self._skip(known, request, bounded(f"cannot be saved: {shown_error(e)}"))
        if known.claim is not None:
            known.claim.users -= 1
            unused = known.claim.tokens is None and known.claim.users == 0
            if unused and self._claims.get(known.options.name) is known.claim:
                del self._claims[known.options.name]  # no sample was passed on: the key is free again
        return held, answer

    def _with_a_mean(
        self, points: Mapping[str, tuple[int, ...]], refused: dict[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """Return ``points`` without points that hold ids. ``refused`` names those."""
        ids = [name for name in points if self._points[name].dtype == "int32"]
        if ids:
            refused["hidden_states_points"] = f"{', '.join(ids)} has no mean and is omitted"
        return {name: layers for name, layers in points.items() if name not in ids}

    def _unwanted(self, known: _KnownRequest, request: Request) -> tuple[bool, dict[str, Any] | None] | None:
        """Return the answer to a request that stores nothing, regardless of its computed tokens; else ``None``."""
        options = known.options
        if known.error is not None:
            return self._skip(known, request, known.error)
        if known.conflict is not None:
            return False, _nothing(known.conflict, {**options.refused, "hidden_states_key": known.conflict})
        if not options.save:
            return self._skip(known, request, "the request set hidden_states_save to false", quiet=True)
        if self._loaded is not None:
            return self._skip(known, request, self._loaded)
        return None

    def _finish(
        self, known: _KnownRequest, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        options = known.options
        if (answer := self._unwanted(known, request)) is not None:
            return answer
        tokens, meta, reason = self._covered(request, options)
        refused = dict(options.refused)
        blocks = np.asarray(block_ids[: -(-len(tokens) // self._block_size)], dtype=np.int64)
        # Block 0 is vLLM's null block. Some models' cache drops blocks between a prompt and its last tokens.
        if reason is None and (real := np.count_nonzero(blocks)) * self._block_size < len(tokens):
            reason = f"expected {-(-len(tokens) // self._block_size)} cache blocks, got {real}"
        prompt = len(request.prompt_token_ids or ())
        if reason is not None:
            return self._skip(known, request, reason)
        chosen = choose(options, prompt, tokens, refused)
        if chosen is None:
            why = f"expected a loss mask with a 1 in it, got one that selects none of {len(tokens)} tokens"
            # A row's sampling seed is the same in each try, so a whole answer is not tried again. Other ends, such as
            # an error, may have cut the answer.
            final = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
            return self._skip(known, request, f"{why}. Correct the mask, or generate more tokens", final=final)
        points = options.points
        if chosen.mean_of and not (points := self._with_a_mean(points, refused)):
            return self._skip(known, request, refused["hidden_states_points"], refused=refused)
        computed = identity_hash(tokens)
        meta |= chosen.meta | self._facts(known, request, computed)
        if (claim := known.claim) is not None and (claim.tokens or computed) != computed:
            refused["hidden_states_key"] = used_before(options.key)  # same prompt, other generated tokens
            return self._skip(known, request, refused["hidden_states_key"], refused=refused, conflict=True)
        if claim is not None:
            claim.tokens = computed
        self._next.saves.append(
            Save(
                request_id=request.request_id,
                key=options.key,
                token_ids=chosen.token_ids,
                block_ids=blocks,
                owner=self._owner(known),
                row=options.row,
                content=options.content,
                positions=chosen.positions,
                columns=columns_of(points, self._points.values()),
                # Two computations of a row may select the same tokens from different texts. A reader must not join
                # their columns.
                sample_hash=token_hash(tokens) if chosen.mean_of or chosen.positions is not None else "",
                meta=meta,
                metadata=options.metadata,
                id=options.id,
                name=options.path or "",
                attached=chosen.attached,
                mean_of=chosen.mean_of,
            )
        )
        self._held.add(request.request_id)
        return True, self._answer(options, chosen, points, meta, refused)

    def _facts(self, known: _KnownRequest, request: Request, computed: str) -> dict[str, Any]:
        """The sample's expiry, inputs other than tokens, and identity, for its ``meta``."""
        ttl = self._settings.ttl_seconds
        facts: dict[str, Any] = {} if ttl is None else {"expires": round(time.time() + ttl)}
        facts |= inputs_of(request)
        if self._settings.one_object:
            facts[IDENTITY] = {"request": known.request or request_hash(request, known.options), "tokens": computed}
        return facts

    def _skip(
        self,
        known: _KnownRequest,
        request: Request,
        reason: str,
        *,
        quiet: bool = False,
        conflict: bool = False,
        final: bool = False,
        refused: dict[str, str] | None = None,
    ) -> tuple[bool, dict[str, Any] | None]:
        self._queue_skip(known, reason, quiet=quiet, conflict=conflict, final=final)
        refused = dict(known.options.refused) if refused is None else refused
        if request.num_computed_tokens == 0 and not refused:
            return False, None  # never scheduled: vLLM expects no answer
        return False, _nothing(reason, refused)

    def _queue_skip(
        self, known: _KnownRequest, reason: str, *, quiet: bool = False, conflict: bool = False, final: bool = False
    ) -> None:
        options = known.options
        owner = self._owner(known)  # also for a request that was never scheduled: its rank stores the marker
        self._next.skipped.append(
            Skip(options.id, options.key, options.name, owner, reason, quiet, conflict, known.request, final=final)
        )

    def _covered(
        self, request: Request, options: RequestParams
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any], str | None]:
        """Return the tokens (int64) whose states are computed, their ``meta``, and the reason if there are none."""
        none, again = np.empty(0, np.int64), "Send the request again"
        prompt = request.prompt_token_ids
        if not prompt or request.prompt_embeds is not None:
            return none, {}, "expected a prompt of token ids, got embeddings. Send text or token ids"
        # vLLM counts tokens of a step in flight as computed, but their states may not be written yet.
        computed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        if computed < len(prompt):
            return none, {}, f"expected {len(prompt)} computed tokens, got {computed} ({request.status.name}). {again}"
        if not options.include_output_tokens:
            return np.asarray(prompt, dtype=np.int64), {}, None
        if aborted and self._settings.aborted_outputs == "drop":
            return none, {}, "the request was aborted, and aborted_outputs is 'drop'"
        # The last token was sampled but never an input, so it has no state.
        last = len(request.all_token_ids) - (1 if request.num_output_tokens else 0)
        tokens = np.asarray(request.all_token_ids[:last], dtype=np.int64)
        meta: dict[str, Any] = {"prompt_tokens": len(prompt)}
        if aborted:
            # The client disconnected, or a stop string ended the request. The engine cannot distinguish them.
            meta["finish_reason"] = "abort"
            tokens = tokens[: max(computed, len(prompt))]
        elif computed < len(tokens):
            return none, {}, f"expected {len(tokens)} computed tokens, got {computed} ({request.status.name}). {again}"
        return tokens, meta, None

    def _answer(
        self,
        options: RequestParams,
        chosen: Chosen,
        points: Mapping[str, tuple[int, ...]],
        meta: dict[str, Any],
        refused: dict[str, str],
    ) -> dict[str, Any]:
        base = self._settings.output.rstrip("/")
        stored = {name: self._stored(name, layers, chosen) for name, layers in points.items()}
        hidden_states = stored.pop(HIDDEN_STATES, {})
        return {
            "hidden_states_path": f"{base}/{options.name}" if self._settings.one_object else base,
            "hidden_states_key": options.key,
            "hidden_states_meta": {
                **hidden_states,
                **({"points": stored} if stored else {}),
                "codec": self._settings.codec,
                **meta,
                **({"refused": refused} if refused else {}),
            },
        }

    def _stored(self, name: str, layers: tuple[int, ...], chosen: Chosen) -> dict[str, Any]:
        point = self._points[name]
        return {
            "shape": [len(chosen.token_ids), len(layers), point.width * point.shards],
            "dtype": "float32" if chosen.mean_of else point.dtype,
            "layer_ids": list(layers),
        }

    # -- a step --------------------------------------------------------------------------------------------------

    def build_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        withhold_from_workers(scheduler_output)
        meta, self._next = self._next, StepMetadata()
        meta.idle = scheduler_output.total_num_scheduled_tokens == 0
        # Only objects of single samples have lock files, which must exist before the answer. A resumed request may be
        # listed as new again; its owner got ``Expect`` the first time.
        for new in scheduler_output.scheduled_new_reqs if self._settings.one_object else ():
            known = self._known.get(new.req_id)
            if known is not None and known.owner is None and known.options.save and known.conflict is None:
                options = known.options
                try:
                    owner = self._owner(known)
                    meta.expected.append(Expect(options.id, options.name, owner, options.chosen, known.request))
                except Exception:
                    log.exception("request %s has no name", options.id)
        return meta

    def tokens_were_loaded(self, tokens: int) -> None:
        """Store nothing from now on: this engine did not compute rows of loaded tokens, and prefix hits share them."""
        if self._loaded is None:
            self._loaded = f"expected tokens computed by this engine, got {tokens} that another connector loaded"
            log.error("no hidden states are stored: %s. Remove that connector from MultiConnector", self._loaded)

    def copies_done(self, request_ids: set[str]) -> None:
        self._held -= request_ids

    @property
    def holds_blocks(self) -> bool:
        """Whether held blocks will be freed, so that the scheduler need not preempt a request."""
        return bool(self._held)

    @property
    def has_news(self) -> bool:
        """Whether the workers need one more step, with or without tokens, to get all saves and skips."""
        return bool(self._next.saves or self._next.skipped)

    @property
    def pending(self) -> int:
        """Number of finished requests that the workers have not received or not copied."""
        return len(self._next.skipped) + len(self._held)

    def shutdown(self) -> None:
        """Log the finished requests that no worker received."""
        left = [s.key for s in self._next.saves] + [s.key for s in self._next.skipped if not s.quiet]
        if left:
            log.error(
                "the engine ends with %d finished requests that its workers did not receive, %s%s; neither states nor "
                "markers are stored for them. Flush the engine first (hsx_dist.connector.flush)",
                len(left),
                ", ".join(left[:5]),
                "…" if len(left) > 5 else "",
            )


def _refused(options: RequestParams, why: str) -> _KnownRequest:
    """Return a request that stores nothing. Its hash differs from that of every other sample."""
    return _KnownRequest(options, identity_hash(options.id) if options.chosen else "", error=why)


def _nothing(reason: str, refused: dict[str, str]) -> dict[str, Any]:
    meta: dict[str, Any] = {"saved": False, "reason": reason}
    return {"hidden_states_meta": meta | ({"refused": refused} if refused else {})}
