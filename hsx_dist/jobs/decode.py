"""Converts token ids to text with a ``tokenizer.json``, which holds data and no code.

A stored run does not choose the tokenizer. Otherwise its author could make a reader download, open and run files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hsx_dist.errors import ConfigError, is_error
from hsx_dist.home import with_home
from hsx_dist.logger import get_logger
from hsx_dist.models.builtin import SMOLLM2, resolve_model
from hsx_dist.reading.arguments import path_text
from hsx_dist.regular_files import check_folder
from hsx_dist.text import first_line

#: Token ids → their text.
Decode = Callable[[Sequence[int]], str]
#: Tokenizers (Rust) take uint32 and raise OverflowError for others.
_MAX_ID = (1 << 32) - 1

log = get_logger(__name__)


def choose_decoder(tokenizer: str | None, info: Mapping[str, Any]) -> Decode | None:
    """A function that maps token ids to text, or None if the reader named no tokenizer.

    Args:
        tokenizer: the reader's choice: a folder with ``tokenizer.json``, or an id of the Hugging Face hub.
        info: the run's ``run.json``. A run of the built-in model is decoded without ``tokenizer``.

    Raises:
        ConfigError: ``tokenizer`` cannot be loaded.
    """
    if tokenizer is not None:
        return load_decoder(resolve_model(path_text("tokenizer", tokenizer)))
    if not _is_builtin(info.get("meaning")):
        return None
    try:
        return load_decoder(resolve_model(SMOLLM2))
    except (ConfigError, ImportError, OSError) as e:
        log.info("tokens are shown as ids: %s", e)
        return None


def load_decoder(source: str) -> Decode:
    """The decoder of the ``tokenizer.json`` in the folder ``source``, or in the hub's repository of that id.

    Raises:
        ConfigError: it cannot be loaded, or the package ``tokenizers`` is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer: expected the package tokenizers, got none. Install it, or leave the option out"
        ) from None
    try:
        folder = with_home(source)
        if folder.is_dir():
            check_folder(folder)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            tokenizer = Tokenizer.from_pretrained(source)
    except BaseException as e:  # the package raises Exception itself
        if not is_error(e):
            raise
        raise ConfigError(
            f"--tokenizer: expected a folder or a repository of the hub with tokenizer.json, got {source!r} "
            f"({first_line(e)}). Check the name and the access to it"
        ) from e

    def decode(ids: Sequence[int]) -> str:
        # The package takes unsigned 32-bit ids; a stored id may be any int64.
        known = [i for i in ids if 0 <= i <= _MAX_ID]
        try:
            return str(tokenizer.decode(known, skip_special_tokens=False))
        except BaseException as e:
            if not is_error(e):
                raise
            raise ConfigError(
                f"--tokenizer: expected a tokenizer that decodes the stored ids, got {first_line(e)}. Name the model's "
                "own, or leave the option out"
            ) from e

    return decode


def _is_builtin(meaning: Any) -> bool:
    """Whether the run was made with the built-in model and its own tokenizer."""
    if not isinstance(meaning, Mapping) or meaning.get("model") != SMOLLM2:
        return False
    arguments = meaning.get("engine_kwargs") or {}
    return isinstance(arguments, Mapping) and arguments.get("tokenizer") in (None, SMOLLM2)
