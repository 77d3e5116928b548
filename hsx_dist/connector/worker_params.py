"""Which of a client's JSON values reach the workers.

vLLM pickles the sampling parameters of each new request for its worker processes, within the engine's step. A value
that is nested too deeply raises there, and that ends the engine with all requests. ``extra_args`` are the only
parameters of any shape: vLLM checks the depth of schemas, and its other parameters are flat.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING

from hsx_dist.connector.request_params import PARAMS
from hsx_dist.json_limits import is_deeper
from hsx_dist.logger import get_logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

log = get_logger(__name__)

#: Parameters of connectors. Only the scheduler reads them, as attributes of the request, where they stay.
_OF_CONNECTORS = {PARAMS, "ec_transfer_params"}
#: Levels of another value of ``extra_args``. vLLM allows schemas 64 levels. Pickle raises at about 500 levels.
MAX_DEPTH = 100
#: Values that are checked one by one.
MAX_VALUES = 32
#: Lists and objects in such a value: the check visits each within the engine's step.
MAX_CONTAINERS = 10_000


def withhold_from_workers(scheduler_output: SchedulerOutput) -> None:
    """Remove connectors' parameters from a step's new requests, and other values that exceed the limits.

    The limits are for each value. With more than ``MAX_VALUES`` values, they are for all lists and objects together.
    """
    for new in scheduler_output.scheduled_new_reqs:
        params = new.sampling_params
        extra = params.extra_args if params is not None else None
        if not extra:
            continue
        kept = {k: v for k, v in extra.items() if k not in _OF_CONNECTORS}
        if is_deeper(kept, MAX_DEPTH + 1, MAX_CONTAINERS + 1):
            own, few = len(kept), len(kept) <= MAX_VALUES
            kept = {
                k: v
                for k, v in kept.items()
                if not isinstance(v, list | tuple | dict) or (few and not is_deeper(v, MAX_DEPTH, MAX_CONTAINERS))
            }
            if len(kept) < own:
                _warn_once()
        if len(kept) == len(extra):
            continue
        new.sampling_params = copy.copy(params)  # the request and the prompt's other choices share the object
        new.sampling_params.extra_args = kept


@cache
def _warn_once() -> None:  # a client may send many such requests
    log.warning(
        "lists and objects of extra_args with more than %d levels, or more than %d in all, are ignored: vLLM pickles "
        "them within the engine's step, and deep ones would end the engine",
        MAX_DEPTH,
        MAX_CONTAINERS,
    )
