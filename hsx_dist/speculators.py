"""A plug-in by which speculators reads hidden states from a run, without an export.

    python -m hsx_dist.speculators train --hidden-states-backend hsx --hsx-run s3://bucket/run --data-path DATA …

This command is ``speculators train`` with the additional back end ``hsx``. Row *i* of the prepared data set at
``--data-path`` must be the run's input row *i*, with the same tokens; speculators compares them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from hsx_dist.cli.commands import refuse_credential
from hsx_dist.cli.exit_codes import run_command
from hsx_dist.config import parse_storage_options
from hsx_dist.errors import ConfigError, Denied, FormatError, NotFound, SampleFailed, Unavailable
from hsx_dist.format.container import Part
from hsx_dist.format.markers import OBJECT, is_of_a_run, lock_name
from hsx_dist.format.part_request import layer_list
from hsx_dist.new_process import begin_process
from hsx_dist.page import token_hash
from hsx_dist.reading import Run, open_run
from hsx_dist.reading.arguments import path_text
from hsx_dist.reading.load import answered_identity, load_object
from hsx_dist.reading.object_lock import exclusive_lock
from hsx_dist.reading.whole import require_whole
from hsx_dist.store import Store
from hsx_dist.store.base import Conditional, version_of
from hsx_dist.store.within import open_within
from hsx_dist.text import head

__all__ = ["HsxBackend", "HsxTransfer", "main"]


_Shown = tuple[dict[str, Any], str]


def _shown(meta: Mapping[str, Any], token_ids: np.ndarray[Any, Any]) -> _Shown:
    """Return values that change when the object is stored again. Without ``bad``, which ``Sample.meta`` changes."""
    return {name: value for name, value in meta.items() if name != "bad"}, token_hash(token_ids)


def _rows_of(run: Run) -> np.ndarray[Any, Any]:
    """Return the input row of each sample that has one, ascending. Its index is the sample's place in the run.

    Raises:
        ConfigError: two samples have one row number. A resume with the rows in another order stores such samples.
    """
    rows = run.index.rows
    rows = rows[: np.count_nonzero(rows >= 0)]  # samples without a row are behind the others
    if (twice := np.flatnonzero(rows[1:] == rows[:-1])).size:
        first = int(twice[0])
        keys = [head(run.at(place).key, 80) for place in (first, first + 1)]
        raise ConfigError(
            f"--hsx-run: expected one sample of each input row, got {keys[0]!r} and {keys[1]!r} of row {rows[first]}: "
            f"the input of {run.url} changed its order between attempts. Extract into another output, or export"
        )
    return rows


def _delete_if(store: Store, name: str, loaded: _Shown) -> None:
    """Delete the object that was loaded, and its lock file.

    A newer object stays, except in a store without conditional deletes if it is stored between the check and the
    delete. An object stays if a server or a reader holds its lock. If this user may not lock the lock file, only the
    lock file stays.
    """
    has_lock_file: Callable[[], bool] | None = None
    with ExitStack() as held:
        try:
            if "://" not in store.url:
                with suppress(Denied, Unavailable):
                    has_lock_file = held.enter_context(exclusive_lock(store.url, name))
            # Read before the check, so that the version is not newer than the checked object.
            version = version_of(store, name)
            part = Part.open(store, name)
            if _shown(part.segments[0].segment.meta, part.token_ids(0)) != loaded:
                return
        except (NotFound, FormatError):  # in use, deleted, or replaced between two requests
            return
        if version is None:
            store.delete(name)
        else:
            assert isinstance(store, Conditional)
            if not store.delete_version(name, version):
                return
        if has_lock_file is not None and has_lock_file():
            store.delete(lock_name(name))


class HsxTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Samples of a run by input row, and samples that a server's responses name.

    A server's response has a path or URL. Only objects under ``storage_path`` are read or deleted.

    Args:
        run: path or URL of a run; ``None``: only servers' samples are read.
        layers: vLLM's ids, first the auxiliary layers, then the last one (N); ``None``: all of the run, ascending.
        storage_options: fsspec's options.
        wait: seconds to wait for a server's object.
        delete_generated: remove a server's object after it was read.
        storage_path: folder or URL under which servers store; ``None``: no server's object is read.
    """

    def __init__(
        self,
        run: str | None,
        layers: Sequence[int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        wait: float = 60,
        delete_generated: bool = False,
        storage_path: str | None = None,
    ):
        self._url, self._layers, self._options = (
            run,
            None if layers is None else list(layer_list(layers)),
            storage_options,
        )
        self._wait, self._delete, self._storage_path = wait, delete_generated, storage_path
        self._run: Run | None = None
        self._rows = np.zeros(0, np.int64)
        self._loaded: dict[str, _Shown] = {}  # name → identity of the loaded object; ``delete`` removes no other

    def setup(self) -> None:
        """Open the run. Called once in each process that reads."""
        if self._run is None and self._url is not None:
            run = open_run(self._url, storage_options=self._options)
            missing = sorted(set(self._layers or ()) - set(run.layer_ids))
            if missing and run.layer_ids:
                raise ConfigError(
                    f"--hsx-layers: expected layers of {run.url}, {list(run.layer_ids)}, got {missing} too. "
                    "Name layers of the run"
                )
            self._rows = _rows_of(run)
            self._run = run

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """Load an input row's ``hidden_states`` ``[T, L, H]`` and ``token_ids`` ``[T]``; ``None`` without a sample.

        Raises:
            ConfigError: the sample is a selection of its tokens.
        """
        self.setup()
        place = int(np.searchsorted(self._rows, file_idx))
        if self._run is None or file_idx not in self._rows[place : place + 1]:
            return None
        sample = self._run.at(place)
        require_whole(sample.key, sample.meta)
        loaded = sample.load(self._layers or sorted(sample.layer_ids), framework="torch")
        return {"hidden_states": loaded["hidden_states"], "token_ids": loaded["token_ids"]}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Wait for the object in a response's ``kv_transfer_params``, and load its sample.

        Returns ``None`` if the request failed.

        Raises:
            SampleConflict: the object belongs to another request: its identity differs from the response's.
            ConfigError: the response's path or URL is not under ``storage_path``, or the sample is a selection.
            NotFound: there is no object after ``wait`` seconds.
            StoreError: the store's error; or ``storage_path`` is a folder, and the object's path contains a link.
        """
        store, name = self._open(hs_transfer_params.get("hidden_states_path"))
        try:
            loaded = load_object(
                store,
                name,
                layers=self._layers,
                wait=self._wait,
                identity=answered_identity(hs_transfer_params),
                framework="torch",
            )
        except SampleFailed:
            return None
        require_whole(loaded["key"], loaded["meta"])
        if self._delete:
            self._loaded[name] = _shown(loaded["meta"], loaded["token_ids"].numpy())
        return {"hidden_states": loaded["hidden_states"], "token_ids": loaded["token_ids"]}

    def delete(self, handle: str) -> None:
        """Remove a server's object that ``get_generated`` has loaded, if ``delete_generated`` is set.

        Objects of other requests stay: speculators also calls this if ``get_generated`` has loaded nothing. A run's
        parts stay too. An object that was stored again after it was loaded stays, unless sample and expiry time are
        the same. An object that another request or reader uses at this moment stays.

        Raises:
            ConfigError: ``handle`` is not under ``storage_path``.
            StoreError: the store's error.
        """
        if self._delete:
            store, name = self._open(handle)
            # ``storage_path`` may be a folder of a run, or a link to one.
            path = f"{os.path.realpath(store.url) if store.url.startswith('/') else store.url}/{name}"
            loaded = self._loaded.pop(name, None)
            if loaded is not None and name.endswith(OBJECT) and not is_of_a_run(path):
                _delete_if(store, name, loaded)

    def _open(self, named: object) -> tuple[Store, str]:
        if self._storage_path is None:
            raise ConfigError(
                "--hsx-storage-path: expected the folder or URL under which the server stores, got none. Set it: "
                "objects that a server's response names are read only there"
            )
        return open_within(self._storage_path, named, self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_rows": np.zeros(0, np.int64)}


class HsxBackend(HiddenStatesBackend):  # type: ignore[misc]
    """``--hidden-states-backend hsx``."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add ``--hsx-run``, ``--hsx-layers``, ``--hsx-storage-options``, ``--hsx-storage-path``."""
        parser.add_argument("--hsx-run", type=str, default=None, help="Path or URL of the run of hsx_dist to read.")
        parser.add_argument(
            "--hsx-layers",
            type=str,
            default=None,
            help="vLLM's layer ids, the last one (N) at the end, such as 2,15,27,30. Default: all, ascending.",
        )
        parser.add_argument(
            "--hsx-storage-options",
            type=str,
            default=None,
            help="fsspec's options for the store, as a JSON object; credentials as '${env:NAME}'.",
        )
        parser.add_argument(
            "--hsx-storage-path",
            type=str,
            default=None,
            help="Folder or URL where the server stores. Generated samples are read only there.",
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add ``--hsx-storage-path``: where a launched server stores."""
        parser.add_argument("--hsx-storage-path", type=str, default=None, help="Folder or URL where the server stores.")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> HsxTransfer:  # noqa: ARG004
        """Make a transfer from the arguments."""
        try:
            layers = None if args.hsx_layers is None else [int(k) for k in args.hsx_layers.split(",")]
        except ValueError as e:
            raise ConfigError(
                f"--hsx-layers: expected layer ids separated by commas, such as 2,15,27, got {args.hsx_layers!r}"
            ) from e
        options = None
        if args.hsx_storage_options is not None:
            # JSON is YAML. Literal credentials are refused: lists of jobs and processes show arguments.
            options = parse_storage_options([f"hsx-storage-options={args.hsx_storage_options}"])["hsx-storage-options"]
            if not isinstance(options, dict):
                raise ConfigError(f"--hsx-storage-options: expected a JSON object, got a {type(options).__name__}")
        for name, value in (("--hsx-run", args.hsx_run), ("--hsx-storage-path", args.hsx_storage_path)):
            path_text(name, value or "")
        return HsxTransfer(args.hsx_run, layers, options, storage_path=args.hsx_storage_path)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Return the ``--kv-transfer-config`` of ``vllm serve`` with hsx_dist's connector."""
        if not args.hsx_storage_path:
            raise ConfigError(
                "--hsx-storage-path: expected a folder or URL, got none. Set it to the place where the server stores"
            )
        return {
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": path_text("--hsx-storage-path", args.hsx_storage_path)
            },
        }


if __name__ != "__main__":
    HiddenStatesBackend.register("hsx")(HsxBackend)


def main() -> None:
    """Run speculators' command. Importing this module registers the back end."""
    begin_process()
    # Not run_app: speculators configures its own logging.
    run_command(_checked_command, "speculators")


def _checked_command() -> Any:
    """Check the arguments, then run speculators' command: it stores its arguments before it uses the back end."""
    given = sys.argv[1:]
    for number, argument in enumerate(given, 1):
        for text in argument.split("=", 1) if argument.startswith("-") else [argument]:
            refuse_credential(f"argument {number}", text)
    parser = argparse.ArgumentParser(add_help=False)
    HsxBackend.add_train_args(parser)
    HsxBackend.from_train_args(parser.parse_known_args(given)[0], "")
    from speculators.__main__ import app

    return app(standalone_mode=False)


if __name__ == "__main__":
    # Imported under its real name, which the trainer's spawned workers import.
    import hsx_dist.speculators as backend

    backend.main()
