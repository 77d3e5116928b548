"""``hsx report``: one page about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsx_dist.config import parse_storage_options
from hsx_dist.errors import ConfigError
from hsx_dist.format.runs import read_run
from hsx_dist.logger import get_logger
from hsx_dist.observe.console import say
from hsx_dist.observe.report import write_report
from hsx_dist.store import open_store

if TYPE_CHECKING:
    from hsx_dist.observe.report.page import Decode

log = get_logger(__name__)


def run_report(path: str, options: Sequence[str], *, output: str, keys: Sequence[str], samples: int) -> None:
    """Write the page about the run at ``path`` to the file ``output``, and say where it is."""
    store = open_store(path, parse_storage_options(options))
    target = Path(output)
    if not target.parent.is_dir():
        raise ConfigError(f"-o: expected a file in a folder that is there, came {output!r}; make {target.parent} first")
    page = write_report(store, chosen=keys, samples=samples, decode=tokenizer_of(read_run(store)))
    target.write_text(page, encoding="utf-8")
    say(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")


def tokenizer_of(info: dict[str, Any]) -> Decode | None:
    """The tokenizer of the run's model, where transformers is installed and the model is at hand; else None."""
    try:
        from hsx_dist.jobs.decode import decoder_of

        return decoder_of(info.get("meaning", {}))
    except (ImportError, ConfigError) as e:
        log.info("tokens are shown as ids: %s", e)
        return None
