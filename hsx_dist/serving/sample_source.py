"""Read a server's stored samples for its clients, on separate threads, within limits of time and memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.errors import FormatError, HsxError, SampleNotFound, Unavailable
from hsx_dist.format.expires import expires_by
from hsx_dist.format.markers import OBJECT
from hsx_dist.page import object_name
from hsx_dist.reading.load import FIRST_PAUSE, LONGEST_PAUSE, READ_AGAIN, WORTH_WAITING, object_sample
from hsx_dist.serving.refusals import Refusal, refusal_of
from hsx_dist.serving.states_file import Range, StatesFile
from hsx_dist.store import Store, open_store
from hsx_dist.text import printable
from hsx_dist.writers.daemon import DaemonPool

#: Number of concurrent calls to the store. They do not run on the event loop's default threads, which vLLM uses. So a
#: store that hangs does not block requests that ask for no states.
_THREADS = 8
#: The store's own retries block a thread, so they are short. Errors that outlast them are retried here, while the
#: client waits.
_RETRY_SECONDS = 5.0
#: A call to the store fails after so many seconds.
_STORE_SECONDS = 60.0
#: Limit of the polls per second of all requests that have waited for a second. Without it, waiting requests would take
#: the threads and the process's time from other requests.
_LOOKS = 20.0

T = TypeVar("T")


class MemoryLimit:
    """Limit of the bytes that all answers together hold. Waiting answers get bytes in order of arrival."""

    def __init__(self, nbytes: int):
        self._total = nbytes
        self._held = 0
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    def has_room(self, nbytes: int) -> bool:
        """Whether ``hold`` would return at once."""
        return not self._turn.locked() and self._held + min(self._total, nbytes) <= self._total

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for ``nbytes`` and hold them. An answer larger than the limit holds all bytes.

        Raises:
            Refusal: the bytes were not released within ``_STORE_SECONDS``.
        """
        wanted, held = min(self._total, nbytes), 0
        try:
            try:
                async with asyncio.timeout(_STORE_SECONDS), self._turn:
                    while self._held + wanted > self._total:
                        self._released.clear()
                        await self._released.wait()
                    held = wanted
                    self._held += held
            except TimeoutError:
                raise Refusal(
                    503,
                    Unavailable.__name__,
                    f"expected {nbytes} bytes of memory for this answer, got none: other answers hold them. Ask again "
                    "later",
                ) from None
            yield
        finally:
            self._held -= held
            self._released.set()


class SampleSource:
    """The samples of this server's connector, by key."""

    def __init__(self, settings: ConnectorConfig):
        self.inline_bytes = settings.inline_bytes
        self.memory = MemoryLimit(16 * settings.inline_bytes)
        self._settings = settings
        self._threads = DaemonPool(_THREADS, "hsx-answer")
        self._waiting = 0  # requests whose sample is not stored yet
        self._store: Store | None = None

    @asynccontextmanager
    async def held(
        self, key: str, wanted: Range, *, wait: float, identity: Mapping[str, str] | None = None
    ) -> AsyncIterator[StatesFile]:
        """Call ``find``, and hold the memory in which the file is loaded piece by piece.

        A request that waits for memory holds none: it drops the parts of the sample that it has read, and reads them
        again.
        """
        file: StatesFile | None = await self.find(key, wanted, wait=wait, identity=identity)
        assert file is not None
        nbytes = file.front_bytes + file.loading_bytes
        if not self.memory.has_room(nbytes):
            file = None
        async with self.memory.hold(nbytes):
            yield file or await self.find(key, wanted, wait=0, identity=identity)

    async def find(
        self, key: str, wanted: Range, *, wait: float, identity: Mapping[str, str] | None = None
    ) -> StatesFile:
        """Return the sample of ``key`` once it is stored.

        The server renews an expired object if its key is used again, so the request waits for that too.

        Raises:
            Refusal: the sample is not stored or has expired after ``wait`` seconds, has failed, or lacks a requested
                point, layer or identity.
        """
        end, pause = time.monotonic() + wait, FIRST_PAUSE
        self._waiting += 1
        try:
            while True:
                try:
                    return await self._unexpired(key, wanted, identity)
                except (*WORTH_WAITING, Refusal) as e:
                    left = end - time.monotonic()
                    if left <= 0:
                        if isinstance(e, Refusal):
                            raise
                        raise self._refusal(e, key, wait) from e
                except HsxError as e:
                    raise refusal_of(e, key) from e
                await self._pause(pause, end)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._waiting -= 1

    async def _pause(self, pause: float, end: float) -> None:
        """Wait for ``pause`` seconds. If that is the longest pause, wait on while the others of its share may look."""
        began = now = time.monotonic()
        while now < end and (now == began or (pause >= LONGEST_PAUSE and now - began < self._waiting / _LOOKS)):
            await asyncio.sleep(min(pause, end - now))
            now = time.monotonic()

    async def _unexpired(self, key: str, wanted: Range, identity: Mapping[str, str] | None) -> StatesFile:
        file = await self._call(lambda: self._look(key, wanted, identity))
        if expires_by(file.meta, time.time()):
            raise _expired(key, float(file.meta["expires"]))
        return file

    async def piece(self, file: StatesFile, i: int, again: Callable[[], StatesFile]) -> bytes | memoryview:
        """Return the ``i``-th piece of ``file``. Raises ``HsxError``.

        ``again`` finds the sample again if its object was replaced since. The server extends the expiry of a key that
        is used again.
        """

        def load() -> bytes | memoryview:
            try:
                return file.piece(i)
            except FormatError:
                other = again()
                if not file.is_of_same_sample(other):
                    raise
                return other.piece(i) if i else file.piece(0)

        return await self._call(load)

    def look(self, key: str, wanted: Range) -> StatesFile:
        """Return the sample of ``key`` if it is stored now, also an expired one. Blocks; raises ``HsxError`` only."""
        return self._look(key, wanted, None)

    def _look(self, key: str, wanted: Range, identity: Mapping[str, str] | None) -> StatesFile:
        if self._store is None:
            self._store = open_store(
                self._settings.output, self._settings.storage_options, retry_seconds=_RETRY_SECONDS
            )
        name = object_name(key) + OBJECT
        for last in (False, True):
            try:
                with object_sample(self._store, name, identity=identity) as sample:
                    if sample.key not in (key, object_name(key)):  # a file of another program has no key
                        raise SampleNotFound(f"{name}: expected sample {key!r}, got {sample.key!r}. Check the key")
                    file = StatesFile(sample, wanted)
                break
            except READ_AGAIN:
                if last:
                    raise
        return file

    async def _call(self, call: Callable[[], T]) -> T:
        with suppress(TimeoutError):  # as in ``TimelySend``
            async with asyncio.timeout(_STORE_SECONDS):
                return await asyncio.wrap_future(self._threads.submit(call))
        raise Unavailable(f"expected the store to answer within {_STORE_SECONDS:.0f} s, got nothing. Check the store")

    def _refusal(self, error: HsxError, key: str, wait: float) -> Refusal:
        refusal = refusal_of(error, key)
        if refusal.status != 404:
            return refusal
        return Refusal(
            404,
            type(error).__name__,
            f"expected the key of a stored sample, got {printable(repr(key), 200)}, which is not stored after {wait:g} "
            "s. Check the key, or wait longer",
        )


def _expired(key: str, end: float) -> Refusal:
    shown = printable(repr(key), 200)
    return Refusal(
        410,
        "SampleExpired",
        f"expected a sample that has not expired, got key {shown}, which expired at {end:.0f} (seconds since the "
        "epoch). Ask the model again, or set a longer ttl_seconds on the server",
    )
