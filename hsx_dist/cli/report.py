"""``hsx report``: one page about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hsx_dist.config import parse_storage_options
from hsx_dist.errors import ConfigError
from hsx_dist.format.place import read_run
from hsx_dist.observe.console import say
from hsx_dist.observe.report import write_report
from hsx_dist.store import open_store
from hsx_dist.store.output_file import output_file


def run_report(
    path: str,
    options: Sequence[str],
    *,
    output: str,
    keys: Sequence[str],
    samples: int,
    tokenizer: str | None = None,
    model: str | None = None,
) -> None:
    """Write the page about the run at ``path`` to the file ``output``, and print the file's path.

    Args:
        tokenizer: a folder or an id of the Hugging Face hub. Without it tokens are ids, except for the built-in model.
        model: a folder or an id of the hub with the ``config.json`` for computing attention patterns.
    """
    from hsx_dist.jobs.decode import choose_decoder

    store = open_store(path, parse_storage_options(options))
    target = Path(output)
    if not target.parent.is_dir():
        raise ConfigError(f"-o: expected a file in a folder that exists, got {output!r}. Make {target.parent} first")
    decode = choose_decoder(tokenizer, read_run(store))
    # One token at a time: half of a character then makes only its token unreadable, not the whole text.
    each = None if decode is None else lambda ids: [decode([i]) for i in ids]
    page = write_report(store, chosen=keys, samples=samples, decode=each, model=model)
    with output_file(target) as f:
        f.write(page.encode())
    say(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
