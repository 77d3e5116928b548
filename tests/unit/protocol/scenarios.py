"""Processes that work on one place at the same time, made of production code, and the promise that they must keep.

Three things are left out, as they decide nothing: heartbeats, the check whether a driver seems alive, and the probe for
conditional puts. The check may be wrong, and no code may rely on its result.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from hsx_dist.config import InputConfig, load_config
from hsx_dist.errors import Fenced, HsxError, RunStalled
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.container import EncodedSegment, SegmentEncoder, build_part
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.format.place import Place, find_place, start_run
from hsx_dist.format.runs import all_receipts, load_manifest, newest_attempt, take_attempt, write_complete
from hsx_dist.inputs.rows import Row, rows_from
from hsx_dist.jobs.accounting import remaining
from hsx_dist.jobs.attempt import complete, open_or_start_run
from hsx_dist.jobs.extract import account_for
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.observe.console import Console
from hsx_dist.observe.metrics import Meter
from hsx_dist.reading import garbage
from hsx_dist.reading.follow import Follower
from hsx_dist.reading.missing import removed_parts
from hsx_dist.reading.retention import Retention
from hsx_dist.reading.run import Run
from hsx_dist.store import Store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from hsx_dist.writers.committer import PartCommitter
from tests.harness.runs import RunWriter, whole
from tests.unit.protocol.explorer import Actor, ConditionalSteppedStore, Scenario, SteppedStore

KEYS = ("a", "b")


@lru_cache
def sample(model: str, key: str) -> RandomSample:
    """A model's states for a key. Each model has other states."""
    return random_sample(key, 3, seed=sum(map(ord, model + key)), layer_ids=(1,), hidden_size=4)


@lru_cache
def encoded(model: str, key: str) -> EncodedSegment:
    encoder = SegmentEncoder(NoneCodec())
    for page in sample(model, key).pages():
        encoder.add(page)
    return encoder.finish()


class Writer:
    """A writer of one attempt. It stores each sample in a separate part."""

    def __init__(self, store: Store, attempt: int, name: str, model: str):
        self._model = model
        self._committer = PartCommitter(
            store, name, attempt=attempt, alone=False, about={"model": model}, meter=Meter()
        )
        self._number = 0

    def store(self, key: str) -> None:
        self._number += 1
        segment = encoded(self._model, key)
        part = build_part([segment], NoneCodec(), {"model": self._model})
        self._committer.commit([segment], part, self._number, 0)


# -- actors: the functions of processes -----------------------------------------------------------------------------


def writing(place: Callable[[Store], Place], attempt: int, name: str, model: str, keys: Sequence[str]) -> Any:
    """A writer that already has its run and attempt. It stores ``keys`` until it is fenced."""

    def main(root: SteppedStore) -> None:
        writer = Writer(place(root).store, attempt, name, model)
        for key in keys:
            try:
                writer.store(key)
            except Fenced:
                return

    return main


def no_heartbeat(*_: Any) -> Any:
    return nullcontext(SimpleNamespace())


def driving(model: str, keys: Sequence[str] = KEYS, *, refused: Sequence[str] = ()) -> Any:
    """A driver: it resumes or starts the run, stores the missing samples and completes the run.

    ``refused``: rows that end without a sample this time.
    """

    def main(root: SteppedStore) -> str:
        config = load_config(None, (), model=model, output=root.url, store={"single_driver": True})

        def rows() -> Iterator[Row | RowFate]:
            return rows_from([{"id": key, "text": key} for key in keys], config.input)

        def compute(_heart: Any, attempt: int, ledger: RowLedger, manifest: Manifest, total: int, _: int) -> None:
            writer = Writer(place.store, attempt, f"w{attempt}", model)
            for row in filter(None, remaining(rows, manifest)):
                assert isinstance(row, Row)
                if row.key in refused:
                    ledger.add(RowFate(row.key, None, "refused", "it was changed", 1, row.content))
                else:
                    writer.store(row.key)
            ledger.flush()
            ledger.read_new_receipts()
            complete(place, ledger, attempt, manifest, total)

        try:
            place, manifest = open_or_start_run(config, root, {"model": model})
            account_for(config, place, manifest, rows, Console(file=io.StringIO()), compute, no_heartbeat)
        except HsxError as e:
            return f"{type(e).__name__}: {e}"
        return place.info["id"]

    return main


def parts_of(run: Run, key: str) -> set[str]:
    """The parts with segments of the sample ``key``."""
    return {proof.part for proof in run.index[run.keys().index(key)].segments}


def collecting(root: SteppedStore) -> None:
    """``hsx gc --delete``, in the wrong belief that no process works on the run."""
    place = find_place(root)
    if place is None:
        return
    for info in garbage.unproven(place, seal=True):
        place.store.delete(info.name)
    for info in garbage.left_behind(root):
        root.delete(info.name)


def removing(root: SteppedStore) -> str:
    """``hsx rm --yes``, in the same wrong belief. Returns the id of the run that it removes."""
    place = find_place(root)
    if place is None:
        return ""
    garbage.remove_run(root, place)
    return str(place.info["id"])


def deleting_by_hand_and_driving(root: SteppedStore) -> str:
    """A user deletes all objects with another program, and starts a run of another model at the same place."""
    for info in root.list():
        root.delete(info.name)
    return str(driving("other", ("a",))(root))


def consuming(place: Callable[[Store], Place], keys: Sequence[str]) -> Any:
    """A consumer that removes used parts."""

    def main(root: SteppedStore) -> None:
        Retention(place(root)).ack(*keys)

    return main


def reading(root: SteppedStore) -> frozenset[str] | str:
    """A reader. Returns the keys of a run if it could read all samples, else the error's name."""
    try:
        run = Run(root)
        for key in run.index.keys:
            run[key].load(framework="numpy")
    except HsxError as e:
        return type(e).__name__
    return frozenset(run.index.keys)


def following(meanwhile: Callable[[MemoryStore], None]) -> Any:
    """A follower. It returns the keys that it yields. ``meanwhile`` happens at its first pause."""

    def main(root: SteppedStore) -> frozenset[str]:
        pauses = iter([lambda: meanwhile(root._inner), lambda: None, lambda: None])

        def sleep(_: float) -> None:
            pause = next(pauses, None)
            if pause is None:
                raise RunStalled("expected the end of the run, got another pause")
            pause()

        follower = Follower(there(root), discover_seconds=0, sleep=sleep, clock=lambda: 0.0)
        return frozenset(record.key for record in follower if record is not None)

    return main


class Trainer:
    """A consumer that follows the run. For each sample it stores a checkpoint, and then acknowledges the sample."""

    def __init__(self) -> None:
        self.checkpoint: tuple[Any, Any] = ({}, None)
        self.seen: list[str] = []

    def train(self, root: Store, first: Callable[[], None] = lambda: None) -> None:
        """Continue from the checkpoint until the run ends or pauses for the third time. ``first`` happens between the
        first checkpoint and its acknowledgement."""
        pauses = iter(range(2))

        def sleep(_: float) -> None:
            if next(pauses, None) is None:
                raise RunStalled("expected the end of the run, got another pause")

        place = there(root)
        position, used = self.checkpoint
        retention, run = Retention(place), Run(root)
        if used is not None:
            retention.load_state_dict(used)
        follower = Follower(place, state=position, discover_seconds=0, sleep=sleep, clock=lambda: 0.0)
        for record in filter(None, follower):
            run.sample_of(record).load(framework="numpy")
            follower.done(record)
            self.seen.append(record.key)
            self.checkpoint = follower.position, retention.state_dict()
            first()
            first = lambda: None  # noqa: E731
            retention.ack(record.key)


def training(root: SteppedStore) -> Trainer:
    """A trainer. The part of its first sample is lost before it acknowledges the sample."""
    trainer = Trainer()
    with suppress(HsxError):  # the lost part may be that of the next sample, or the driver may be dead
        trainer.train(root, lambda: there(root._inner).store.delete(f"data/part-0001-w1-{1:06d}.safetensors"))
    return trainer


def the_trainer_can_continue(store: MemoryStore, actors: dict[str, Actor]) -> None:
    """The trainer and the driver may have died at any time. From the checkpoint, it gets each other sample once."""
    assert actors["trainer"].error is None, repr(actors["trainer"].error)
    trainer, keys = actors["trainer"].result, ("c", *KEYS)
    driving("m", keys)(store)
    trainer.train(store)
    assert sorted(trainer.seen) == sorted(keys), f"expected each sample once, got {trainer.seen}"


# -- the promise ----------------------------------------------------------------------------------------------------


def promise(store: MemoryStore, seen: dict[Any, Any]) -> None:
    """Every sample that a receipt ever proved exists for readers, is readable, and has its model's states.

    Exceptions are runs and parts that were removed on request. No valid receipt names a missing part.
    """
    place = find_place(store)
    if place is None:
        return
    model, run_id = place.info["meaning"]["model"], place.info["id"]
    run = Run(store)
    removed = removed_parts(place.store, place.version)
    void = Manifest(all_receipts(place.store)).void
    for receipt in all_receipts(place.store):
        if receipt.part is not None and receipt.part not in void | removed | seen.get("lost", frozenset()):
            assert f"{place.folder}/{receipt.part}" in store.objects, f"{receipt.part} is proven, but does not exist"
    for key in run.index.keys:
        seen.setdefault((run_id, key), True)
    for owner, key in [s for s in seen if s != "lost"]:
        if owner != run_id or seen[owner, key] is False:
            continue
        if key not in run:
            # The next attempt declares a part lost that something else deleted. Its sample may end as refused.
            assert seen.get("lost"), f"expected the proven sample {key!r}, got none"
            seen[owner, key] = False
            continue
        found = run[key]
        if parts_of(run, key) & (removed | seen.get("lost", frozenset())):
            continue
        states = found.load(framework="numpy")["hidden_states"]
        assert found.about["model"] == model, f"sample {key!r}: got another model's sample"
        assert states.tobytes() == states_of(model, key), f"sample {key!r}: got other states"


def only_these_are_used(keys: Sequence[str]) -> Callable[[MemoryStore, dict[Any, Any]], None]:
    """The promise, if consumers have used only ``keys``."""

    def check(store: MemoryStore, seen: dict[Any, Any]) -> None:
        promise(store, seen)
        run = Run(store)
        removed = removed_parts(run.store, run.version)
        for key in run.index.keys:
            used = parts_of(run, key) & removed
            assert key in keys or not used, f"{key!r}: expected all parts of an unused sample, got a removed one"
        for receipt in all_receipts(run.store):
            if receipt.part in removed:
                # A consumer may have received a copy that does not count any more.
                unused = {proof.segment.key for proof in receipt.segments} & set(run.index.keys) - set(keys)
                assert not unused, f"expected no removed part with copies of unused samples, got {unused}"

    return check


@lru_cache
def states_of(model: str, key: str) -> bytes:
    """The states of a sample as read: float32."""
    store = MemoryStore()
    start_run(store, {"meaning": {"model": model}})
    RunWriter(store, NoneCodec()).put([whole(sample(model, key))])
    states: bytes = Run(store)[key].load(framework="numpy")["hidden_states"].tobytes()
    return states


def all_rows_are_stored(keys: Sequence[str] = KEYS) -> Callable[[MemoryStore, dict[str, Actor]], None]:
    """A driver without error has accounted for all rows, and readers see a complete run."""

    def check(store: MemoryStore, actors: dict[str, Actor]) -> None:
        for actor in actors.values():
            assert actor.error is None or isinstance(actor.error, HsxError), repr(actor.error)
        place = find_place(store)
        done = {a.result for name, a in actors.items() if name.startswith("driver") and ":" not in a.result}
        asked = {a.result for name, a in actors.items() if name.startswith("rm")}
        there = place.info["id"] if place is not None else None
        assert done <= {there, *asked}, "expected the run of a driver without error, got none without a removal"
        if place is not None and there in done:
            manifest = load_manifest(place.store)
            missing = [k for k in keys if k not in manifest.samples and k not in manifest.refused]
            assert not missing, f"expected outcomes of all rows from a driver without error, got none of {missing}"

    return check


# -- scenarios ------------------------------------------------------------------------------------------------------


def begun(model: str = "m", attempts: int = 1) -> Callable[[MemoryStore], None]:
    """A run with this number of attempts."""

    def prepare(store: MemoryStore) -> None:
        place = start_run(store, {"meaning": {"model": model}})
        for _ in range(attempts):
            take_attempt(place.store, {})

    return prepare


def there(store: Store) -> Place:
    """The run that ``begun`` made. A writer receives it, and does not look it up."""
    return _PREPARED[0].at(store)


_PREPARED: list[Place] = []


def remember(prepare: Callable[[MemoryStore], None]) -> Callable[[MemoryStore], None]:
    def both(store: MemoryStore) -> None:
        prepare(store)
        place = find_place(store)
        assert place is not None
        _PREPARED[:] = [place]

    return both


def with_a_lost_part(store: MemoryStore) -> None:
    begun(attempts=0)(store)
    writer = RunWriter(store, NoneCodec(), name="w1")
    for key in KEYS:
        writer.about = {"model": "m"}
        part = writer.put([whole(sample("m", key))]).part
        if key == "a":
            writer.store.delete(part or "")


def attempt_1_completes_with_a_lost_part(store: MemoryStore) -> None:
    """The part of ``a`` is lost. Nothing happens after the next driver has taken the run."""
    place = there(store)
    if newest_attempt(place.store) == 1:
        _store_all(store, attempt=1)
        write_complete(place.store, 1, load_manifest(place.store), {})
        place.store.delete(f"data/part-0001-w1-{1:06d}.safetensors")


def with_an_old_completion(store: MemoryStore) -> None:
    """Attempt 1 is complete. Attempt 2 runs, and has stored one of two segments of ``long`` together with ``a``."""
    begun()(store)
    place = find_place(store)
    assert place is not None
    write_complete(place.store, 1, load_manifest(place.store), {})
    writer = RunWriter(store, NoneCodec(), name="w2", about={"model": "m"})
    long = sample("m", "long")
    writer.put([whole(sample("m", "a")), (long, long.segments(1)[0], None)])


def with_half_a_sample(store: MemoryStore) -> None:
    """Attempt 1 runs, and has stored one of two segments of ``long`` together with ``a``."""
    begun(attempts=0)(store)
    writer = RunWriter(store, NoneCodec(), name="w2", about={"model": "m"})
    long = sample("m", "long")
    writer.put([whole(sample("m", "a")), (long, long.segments(1)[0], None)])


def with_two_samples_in_a_part(store: MemoryStore) -> None:
    """Attempt 1 runs, and has stored ``a`` and ``b`` in one part."""
    begun(attempts=0)(store)
    RunWriter(store, NoneCodec(), name="w2", about={"model": "m"}).put([whole(sample("m", key)) for key in KEYS])


def the_rest_and_the_end(store: SteppedStore) -> None:
    """Attempt 1 stores the rest of ``long``, and completes the run."""
    half(store, attempt=1)
    place = there(store)
    manifest = load_manifest(place.store)
    complete(place, RowLedger(place.store, 1, manifest), 1, manifest, 2)


def half(store: SteppedStore, attempt: int = 2) -> None:
    """The attempt stores the rest of ``long``."""
    place = there(store)
    writer = object.__new__(RunWriter)
    writer.place, writer.store, writer.codec, writer.name = place, place.store, NoneCodec(), "w3"
    writer.attached, writer.about, writer.attempt, writer.seq = None, {"model": "m"}, attempt, 0
    long = sample("m", "long")
    writer.put([(long, long.segments(1)[1], None)])


def the_reader_gets(*allowed: Any) -> Callable[[MemoryStore, dict[str, Actor]], None]:
    """The reader gets at least all samples proven when it began, or one of these errors, never less."""

    def check(store: MemoryStore, actors: dict[str, Actor]) -> None:
        found = actors["reader"].result
        assert found in allowed or (not isinstance(found, str) and found >= set(KEYS)), f"got {found}"
        for actor in actors.values():
            assert actor.error is None, repr(actor.error)

    return check


def the_driver_notices(store: MemoryStore, actors: dict[str, Actor]) -> None:
    """If a driver ended without error, it ended before the removal began."""
    all_rows_are_stored()(store, actors)
    driver, rm = actors["driver"], actors["rm"]
    if ":" not in driver.result and driver.result == rm.result:
        began = rm.numbers[next(i for i, call in enumerate(rm.calls) if "put run.json" in call)]
        assert driver.numbers[-1] < began, "expected an error from the driver of a removed run, got none"


SCENARIOS: dict[str, Scenario] = {
    "a writer and gc": Scenario(
        remember(begun()),
        {"writer": writing(there, 1, "w1", "m", KEYS), "gc": collecting},
        promise,
        all_rows_are_stored(),
    ),
    "a writer, the next driver and gc": Scenario(
        remember(begun()),
        {"writer": writing(there, 1, "w1", "m", KEYS), "driver": driving("m"), "gc": collecting},
        promise,
        all_rows_are_stored(),
    ),
    "two drivers": Scenario(
        remember(begun()), {"driver 1": driving("m"), "driver 2": driving("m")}, promise, all_rows_are_stored()
    ),
    "a writer of a removed run, rm, and a driver of another model": Scenario(
        remember(begun()),
        {"writer": writing(there, 1, "w1", "m", KEYS), "rm": removing, "driver": driving("other")},
        promise,
        all_rows_are_stored(),
    ),
    "two removals and a driver": Scenario(
        remember(begun()),
        {"rm 1": removing, "rm 2": removing, "driver": driving("other")},
        promise,
        all_rows_are_stored(),
    ),
    "a removal, and a driver after a removal by hand": Scenario(
        remember(begun()),
        {
            "rm": lambda root: removing(ConditionalSteppedStore(root)),
            "driver": deleting_by_hand_and_driving,
        },
        promise,
        all_rows_are_stored(("a",)),
    ),
    "a driver and a removal of its run": Scenario(
        remember(begun()), {"driver": driving("m"), "rm": removing}, promise, the_driver_notices
    ),
    "a driver that has only to complete the run, and a removal": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
        {"driver": driving("m"), "rm": removing},
        promise,
        the_driver_notices,
    ),
    "a driver that has nothing to do, and a removal": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store), driving("m")(store))[0]),
        {"driver": driving("m"), "rm": removing},
        promise,
        the_driver_notices,
    ),
    "a writer of the attempt before, and a driver that completes the run without its row": Scenario(
        remember(begun()),
        {"writer": writing(there, 1, "w1", "m", ("b",)), "driver": driving("m", ("a",))},
        promise,
        all_rows_are_stored(("a",)),
    ),
    "a late writer of the attempt that completes the run, and gc": Scenario(
        remember(begun(attempts=0)),
        {"driver": driving("m", ("a",)), "writer": writing(there, 1, "late", "m", ("b",)), "gc": collecting},
        promise,
        all_rows_are_stored(("a",)),
    ),
    "a reader and a removal": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
        {"reader": reading, "rm": removing},
        promise,
        the_reader_gets("RunError", "NotFound"),
    ),
    "a reader, a driver and gc": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
        {"reader": reading, "driver": driving("m", (*KEYS, "c")), "gc": collecting},
        promise,
        the_reader_gets(),
    ),
    "a reader and a consumer": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
        {"reader": reading, "consumer": consuming(there, KEYS)},
        promise,
        the_reader_gets("SampleConsumed", "NotFound"),
    ),
    "a consumer and gc": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
        {"consumer": consuming(there, ("a",)), "gc": collecting},
        only_these_are_used(("a",)),
    ),
    "a consumer, the rest of a sample, and an old completion": Scenario(
        remember(with_an_old_completion),
        {"consumer": consuming(there, ("a",)), "writer": half},
        only_these_are_used(("a",)),
    ),
    "a consumer, and a second copy of a sample next to it": Scenario(
        remember(with_two_samples_in_a_part),
        {"consumer": consuming(there, ("a",)), "writer": writing(there, 1, "w1", "m", ("b",))},
        only_these_are_used(("a",)),
    ),
    "a consumer and the driver that completes the run": Scenario(
        remember(with_half_a_sample),
        {"consumer": consuming(there, ("a",)), "driver": the_rest_and_the_end},
        only_these_are_used(("a",)),
    ),
    "a consumer and the next driver": Scenario(
        remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
        {"consumer": consuming(there, KEYS), "driver": driving("m", (*KEYS, "c"))},
        promise,
        all_rows_are_stored((*KEYS, "c")),
    ),
}


def _store_all(store: MemoryStore, attempt: int | None = None) -> None:
    writer = RunWriter(store, NoneCodec(), name="w1", about={"model": "m"}, attempt=attempt)
    for key in KEYS:
        writer.put([whole(sample("m", key))])


def with_a_lost_part_and_an_outcome(store: MemoryStore) -> None:
    """The row of the lost sample has an outcome from before the sample."""
    with_a_lost_part(store)
    place = find_place(store)
    row = next(rows_from([{"id": "a", "text": "a"}], InputConfig()))
    assert place is not None
    assert isinstance(row, Row)
    RowLedger(place.store, 1, Manifest()).add(RowFate("a", 0, "poison", "it killed its engine", 3, row.content))


def lost(scenario_actors: dict[str, Any], prepare: Callable[[MemoryStore], None] = with_a_lost_part) -> Scenario:
    """A foreign program deleted a part before the actors begin."""

    def first(store: MemoryStore, seen: dict[Any, Any]) -> None:
        place = find_place(store)
        assert place is not None
        gone = {f"data/part-0001-w1-{1:06d}.safetensors"}
        seen["lost"] = frozenset(gone)
        promise(store, seen)
        assert not Run(store).failed, "expected no outcome from before a sample, got one"

    def account(store: MemoryStore, actors: dict[str, Actor]) -> None:
        all_rows_are_stored()(store, actors)
        follower = actors.get("follower")
        if follower is not None and follower.error is None:
            assert follower.result >= set(KEYS), (
                f"expected all samples from a follower that ended, got {follower.result}"
            )
        run = Run(store)
        if any(a.result == run.info["id"] for a in actors.values()):
            for key in run.index.keys:
                run[key].load(framework="numpy")  # all proven samples are readable

    return Scenario(remember(prepare), scenario_actors, first, account)


SCENARIOS["a lost part is computed again"] = lost({"driver": driving("m"), "gc": collecting})
SCENARIOS["the row of a lost part is refused"] = lost({"driver": driving("m", refused=("a",)), "gc": collecting})
SCENARIOS["a lost part of a row with an earlier outcome"] = lost(
    {"driver": driving("m"), "gc": collecting}, with_a_lost_part_and_an_outcome
)
SCENARIOS["a consumer with checkpoints, and the next driver after a lost part"] = Scenario(
    remember(lambda store: (begun(attempts=0)(store), _store_all(store))[0]),
    # The new row is stored before the lost one: the checkpoint does not include the receipt of the latter.
    {"trainer": training, "driver": driving("m", ("c", *KEYS))},
    lambda _store, _seen: None,
    the_trainer_can_continue,
)
SCENARIOS["a follower, and the next driver after a lost part"] = lost(
    {"follower": following(attempt_1_completes_with_a_lost_part), "driver": driving("m")}, begun()
)
