"""The input's sources: files whose rows are numbered together. Opens them, decompressed."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile

import fsspec
from fsspec.implementations import cache_metadata
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem

from hsx_dist.config import InputConfig, is_local, public_url
from hsx_dist.errors import ConfigError, Unavailable
from hsx_dist.home import with_home
from hsx_dist.inputs.allowance import Allowance
from hsx_dist.inputs.decompress import DECOMPRESSORS, DecompressedFile
from hsx_dist.inputs.file_systems import RegularFiles, file_info, innermost, is_web, name_of, with_store_checks
from hsx_dist.inputs.joined import refuse_joined_zip
from hsx_dist.inputs.read_ahead import check_fetched
from hsx_dist.inputs.web import MOST_WHOLE, check_stream
from hsx_dist.inputs.whole_file import ArrivingFile, WholeFile, require_size
from hsx_dist.store.opening import ARCHIVE_SCHEMES, LISTED_CACHES
from hsx_dist.store.options import LOCAL, checked_options
from hsx_dist.store.web_answers import bounding_answers
from hsx_dist.text import head, os_reason

Format = Literal["jsonl", "text", "parquet", "arrow"]
_T = TypeVar("_T")
#: Bytes of a file of lines that are read at once.
_BUFFER = 1 << 18
#: Parts of an ``Allowance`` as which a compressed frame counts. A new decompressor takes tens of microseconds.
_FRAME_PARTS = 4
COMPRESSED = re.compile(r"\.(gz|zst|zstd|bz2|xz|lzma)$", re.IGNORECASE)
LINES = ("jsonl", "text")
ARCHIVES = frozenset({".zip", ".tar", ".7z", ".rar", ".lz4", ".sz", ".snappy", ".br", ".lz", ".z"}) | {
    *(".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
}
#: fsspec cannot open these in bounded memory: tarfile reads as much as a header claims, and references name any file.
_UNBOUNDED = ARCHIVE_SCHEMES - {"zip"}
#: Links that may be before another link. Others of fsspec run code elsewhere (dask), or hide what they read.
_CACHES = LISTED_CACHES | {"simplecache"}
_LINKS = _CACHES | {"zip"}


@dataclass(frozen=True, slots=True)
class InputSource:
    """Files whose rows are numbered together. ``label`` begins the keys of rows without an id, and is unique. ``files``
    are paths of the input's file system."""

    label: str
    files: tuple[str, ...]
    format: Format


@dataclass(frozen=True)
class Input:
    """The input's sources in order, and their file system. ``shown``: the input's path, for messages."""

    sources: tuple[InputSource, ...]
    shown: str
    _fs: Any
    _config: InputConfig

    @property
    def is_plain(self) -> bool:
        """Whether all sources are lines that are not compressed."""
        return all(s.format in LINES and not any(map(self._is_compressed, s.files)) for s in self.sources)

    @property
    def max_row_bytes(self) -> int:
        """Limit of the bytes of a line or row."""
        return int(self._config.max_row_bytes)

    @property
    def most_stored(self) -> int | None:
        """Limit of the stored bytes of all files: the size of a zip file, whose directory may claim more. Else None."""
        return getattr(_zip_file(self._fs), "start_dir", None)

    def open(self, path: str, *, compressed: bool, allowance: Allowance) -> IO[bytes]:
        """Open a file of a source for reading, decompressed according to its name if ``compressed``: a file of lines.

        ``allowance``: counts the stored (compressed) bytes of each read. For lines it also counts the frames, and the
        bytes of a zip file's member.

        Raises:
            ConfigError: it cannot be opened, or a cache is before a URL of unknown size. The message has no text of
                the back end, which may hold credentials.
        """

        size, shown = self.stored_bytes(path), public_url(path)
        if size is None and isinstance(self._fs, CachingFileSystem):  # a page would be stored as the file
            raise _no_size_behind_cache(shown)

        def opened() -> IO[bytes]:
            check_file(self._fs, path)
            members = _zip_file(self._fs)
            if members is not None:  # a member shows only its decompressed bytes
                members.fp = ArrivingFile(getattr(members.fp, "file", members.fp), allowance.arrive)
            file: Any = self._fs.open(path, "rb")
            if members is None:
                return self._checked(file, shown, size, allowance.arrive, in_order=compressed)  # type: ignore[no-any-return]
            if compressed:
                file = WholeFile(ArrivingFile(file, allowance.expand), shown, None, may_grow=True)
            return file  # type: ignore[no-any-return]

        found = with_config_errors(opened, self.shown)
        return _decompressed(found, self._ending(path), allowance) if compressed else found

    def _checked(
        self, file: Any, shown: str, size: int | None, arrive: Callable[[int], None], *, in_order: bool
    ) -> Any:
        """Return ``file``, or a file over it, that raises ``Unavailable`` for other bytes than those asked for.

        A local file may grow while it is read.
        """
        is_local_file = isinstance(self._fs, LocalFileSystem)
        check_fetched(file, shown, in_order=in_order)
        is_stream = is_web(getattr(file, "fs", None)) and file.size is None
        if is_stream:
            check_stream(file, shown, size)
        elif size is not None and not is_local_file:
            require_size(file, shown, size)
        file = ArrivingFile(file, arrive)
        if in_order or (is_stream and size is not None and size <= MOST_WHOLE):
            whole = WholeFile(file, shown, size, may_grow=is_local_file)
            return whole if in_order else io.BytesIO(whole.readall())
        return file

    def stored_bytes(self, path: str) -> int | None:
        """Return the stored (compressed) size of a file of a source, or None if the back end does not know it.

        Raises:
            ConfigError: as ``open``; or it is an object of GCS with a Content-Encoding. GCS may send such an object
                decoded, while its size is the encoded one.
        """

        def size() -> int | None:
            members = _zip_file(self._fs)
            if members is None:
                info = file_info(self._fs, path)
                if encoding := info.get("contentEncoding"):
                    raise ConfigError(
                        f"input.path: expected an object without a Content-Encoding, got "
                        f"{head(str(encoding), 50)!r} at {public_url(path)}. Store it without, and end its name in "
                        ".gz or .zst if it is compressed"
                    )
                return info.get("size")  # type: ignore[no-any-return]
            # A member's recorded size may be false. All members are stored before the directory.
            return min(members.getinfo(path.lstrip("/")).compress_size, members.start_dir)

        return with_config_errors(size, self.shown)

    def _is_compressed(self, path: str) -> bool:
        return self._ending(path) in DECOMPRESSORS

    def _ending(self, path: str) -> str:
        return ending(name_of(self._fs, path))


def found_again(config: InputConfig, sources: tuple[InputSource, ...]) -> Input:
    """Return the input whose sources ``find_input`` found in another process.

    Raises:
        ConfigError: it cannot be reached.
    """
    shown = public_url(config.path)
    return with_config_errors(lambda: Input(sources, shown, file_system(config, shown)[0], config), shown)


def file_system(config: InputConfig, shown: str) -> tuple[Any, str]:
    """Return the file system of ``config.path``, and the path on it."""
    if is_local(config.path):
        # Not by url_to_fs, which would read a colon in a local name as the end of a scheme.
        return RegularFiles(), str(with_home(config.path).absolute())
    _check_chain(config.path, shown)
    return _opened(config.path, checked_options(config.path, config.storage_options), shown)


def _opened(path: str, options: Mapping[str, Any], shown: str) -> tuple[Any, str]:
    """Return fsspec's file system for a chain of URLs, and the path on it. Opens local files as ``RegularFiles``."""
    first, *others = path.split("::")
    last = others[-1] if others else first
    in_folder = is_local(last) or last.partition("://")[0] in LOCAL
    scheme, _, member = first.partition("://")
    if scheme == "zip" and others:
        # A cache between is not needed for a local file.
        url = last if in_folder else "::".join(others)
        schemes = [link.partition("://")[0] for link in others]
        given = checked_options(url, {scheme: options[scheme] for scheme in schemes if scheme in options})
        fs = _opened_zip(*_opened(url, given, shown), shown)
        return fs, fs._strip_protocol(f"zip://{member}")
    if in_folder:
        if others:
            # Checks of local files look for links and FIFOs, which a cache hides.
            raise ConfigError(
                f"input.path: expected a local path without a link such as simplecache:: before it, got {shown}. Name "
                "only the path"
            )
        local = RegularFiles()
        return local, local._strip_protocol(last)
    fs, name = fsspec.core.url_to_fs(path, **bounding_answers(path, options))
    fs = with_store_checks(fs)
    inner = innermost(fs)
    if isinstance(fs, CachingFileSystem) and "gs" in inner.protocol:
        # Given headers, gcsfs copies a file in one request. Its copy in parts never ends if one of them is short.
        inner.get_file = partial(inner.get_file, headers={})
    return fs, name


def _opened_zip(fs: Any, path: str, shown: str) -> Any:
    """Return fsspec's file system for the members of a zip file.

    Raises:
        Unavailable: an answer for its directory has other bytes. Or it is a cache's copy that has not the size of the
            file in the store.
        ConfigError: it is several files, or lacks entries. Or a cache is before a URL of unknown size.
    """
    if isinstance(fs, LocalFileSystem):
        _check_regular(path)
    file = fs.open(path, "rb")
    check_fetched(file, shown, in_order=False)
    if isinstance(fs, CachingFileSystem):
        size = file_info(fs, path).get("size")
        if size is None:
            raise _no_size_behind_cache(shown)
        require_size(file, shown, size)
    try:
        found = fsspec.filesystem("zip", fo=file, mode="r", skip_instance_cache=True)
    except BadZipFile as e:
        if isinstance(e.__context__, Unavailable):  # zipfile replaces each OSError
            raise e.__context__ from None
        raise
    refuse_joined_zip(found.zip)
    return found


def _no_size_behind_cache(shown: str) -> ConfigError:
    return ConfigError(
        f"input.path: expected a server that states the size of {shown}, got none behind the link of a cache. "
        "Remove the link such as simplecache:: before the URL"
    )


def _check_chain(path: str, shown: str) -> None:
    """Raise ConfigError for a chain of URLs that fsspec does not open in bounded time and memory, or with code of data.

    For a zip file in a zip file, fsspec reads the inner file's directory, through a member of any compression. Another
    link before ``zip://`` hides the zip file from the checks of its members.
    """
    schemes = [link.partition("://")[0] for link in path.split("::")]
    if "zip" in schemes[1:] or not _UNBOUNDED.isdisjoint(schemes):
        raise ConfigError(
            "input.path: expected a file of rows, or one in a zip file whose zip:// is the first link "
            f"(zip://NAME::FILE.zip), got {shown}. Extract it, or put a link such as simplecache:: after zip://NAME::"
        )
    if not _LINKS.issuperset(schemes[:-1]):
        raise ConfigError(
            "input.path: expected zip://, simplecache, filecache or blockcache before ::, "
            f"got {shown}. Remove other links"
        )
    if hasattr(cache_metadata, "pickle") and not LISTED_CACHES.isdisjoint(schemes):
        raise ConfigError(
            f"input.path: expected fsspec from 2026.6 on for this cache, got {fsspec.__version__}, which unpickles a "
            "file of the cache's folder. Install a newer fsspec, or use simplecache::"
        )


def _check_regular(path: str) -> None:
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        raise ConfigError(f"input.path: expected a regular file, got a FIFO, socket or device: {path}. Remove it")


def check_file(fs: Any, path: str) -> None:
    """Raise ConfigError for an archive, and for a file that cannot be read in bounded time and memory.

    The headers of a compressed tar file would be read as lines. A FIFO or a device may never end. zipfile expands what
    it reads of a bzip2 or LZMA member in one call.
    """
    if isinstance(fs, LocalFileSystem):
        _check_regular(path)
    found = ending(COMPRESSED.sub("", name_of(fs, path)))
    if found in ARCHIVES:
        raise ConfigError(
            f"input.path: expected a file of rows, plain or compressed as .gz, .zst, .xz or .bz2, got {found}. "
            "Extract it, or name one of its files: zip://NAME::FILE.zip"
        )
    if (members := _zip_file(fs)) is None:
        return
    member = members.getinfo(path.lstrip("/"))
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ConfigError(
            f"input.path: expected {head(path, 200)} in the zip file stored or deflated, got another "
            "compression. Extract it"
        )
    if len(members.filelist) > len(members.NameToInfo):  # zipfile reads only the last one of a name
        raise ConfigError(
            "input.path: expected different names in the zip file, got several members of one name. Extract them, and "
            "give them different names"
        )


def _zip_file(fs: Any) -> Any:
    """Return the ``zipfile.ZipFile`` that the file system reads, or None for another file system."""
    return getattr(innermost(fs), "zip", None)


def _decompressed(file: IO[bytes], ending: str, allowance: Allowance) -> IO[bytes]:
    """Return a file of lines, decompressed according to the ending of its name."""
    found: Any = file
    if (own := DECOMPRESSORS.get(ending)) is not None:
        found = DecompressedFile(found, own, lambda: allowance.expand(parts=_FRAME_PARTS))
    # Other files' readline takes no length or is slow. A line may be larger than the memory.
    return io.BufferedReader(found, _BUFFER)


def ending(name: str) -> str:
    """Return the ending of a file's name, such as ``.gz``."""
    return posixpath.splitext(name)[1].lower()


def with_config_errors(do: Callable[[], _T], shown: str) -> _T:
    """Return the result of ``do``. Converts every error of a back end to a ``ConfigError`` without the error's text."""
    try:
        return do()
    except (ConfigError, Unavailable, MemoryError):
        raise
    except FileNotFoundError as e:
        came, todo = "no such file or bucket", "Check the path"
        status = getattr(e.__cause__, "status", 404)  # fsspec calls every answer of a web server a missing file
        if isinstance(status, int) and status != 404:
            came, todo = f"the status {status}", "Check the URL and input.storage_options"
            if 200 <= status < 300:
                came = f"an answer that is not the whole file (status {status})"
            if 300 <= status < 400:
                came = "a redirect that is not followed"
                todo = "Name the URL behind it, or remove headers, cookies and passwords from input.storage_options"
    except PermissionError:
        came, todo = "a refusal", "Check the file's mode, or the credentials (input.storage_options)"
    except ImportError as e:
        came, todo = f"no support for its scheme ({e.name or 'a package'} is missing)", "Install the extra s3 or gcs"
    except Exception as e:  # noqa: BLE001 (all errors of back ends: raised before anything starts, without their text)
        came, todo = os_reason(e), "Check the URL, the endpoint and input.storage_options"
    raise ConfigError(f"input.path: expected a readable input at {shown}, got {came}. {todo}")
