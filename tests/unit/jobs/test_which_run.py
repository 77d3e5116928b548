"""Which run an extraction continues, and which runs it refuses."""

from __future__ import annotations

import pytest

from hsx_dist.config import load_config
from hsx_dist.errors import ConfigError, NotFound, RunMismatch, Unavailable
from hsx_dist.format.place import read_run, start_run
from hsx_dist.jobs.attempt import open_or_start_run
from hsx_dist.jobs.preflight import open_output
from hsx_dist.store.local import LocalStore


def opened(tmp_path, resume="allow", store=None, single_driver=False, **meaning):
    settings = {"single_driver": single_driver}
    config = load_config(None, (), model="m", output=str(tmp_path), resume=resume, store=settings)
    return open_or_start_run(config, store or LocalStore(tmp_path), {"model": "m", "layers": [1], **meaning})


def test_allow_starts_and_goes_on(tmp_path):
    opened(tmp_path)
    assert read_run(LocalStore(tmp_path))["meaning"]["layers"] == [1]
    opened(tmp_path)


def test_must_wants_a_run_and_never_wants_none(tmp_path):
    with pytest.raises(RunMismatch, match="for resume=must, got none"):
        opened(tmp_path, "must")
    opened(tmp_path, "never")
    with pytest.raises(RunMismatch, match="for resume=never, got one"):
        opened(tmp_path, "never")
    opened(tmp_path, "must")


def test_another_meaning_is_refused_and_every_field_that_differs_is_named(tmp_path):
    opened(tmp_path)
    with pytest.raises(RunMismatch) as e:
        opened(tmp_path, model="other", layers=[2])
    assert "model='other' (stored: 'm')" in str(e.value)
    assert "layers=[2] (stored: [1])" in str(e.value)
    assert "template" not in str(e.value)


def test_stored_settings_are_shown_in_part(tmp_path):
    """They are of a stored object: its texts may be long, and have control characters."""
    many = {f"\x1b{n}" + "x" * 1000: "y\n" * 1000 for n in range(100)}
    meaning = {"model": "m" * 100_000, "layers": [1], "revision": None, **many}
    start_run(LocalStore(tmp_path), {"meaning": meaning, "settings": {}, "created": ""})
    with pytest.raises(RunMismatch, match=r"and \d+ more\. Use the stored settings") as e:
        opened(tmp_path)
    assert len(str(e.value)) < 15_000
    assert str(e.value).isprintable()


def test_no_run_starts_while_the_mount_of_the_output_is_gone(tmp_path):
    mount = tmp_path / "mount"
    opened(mount / "run")
    config = load_config(None, (), model="m", output=str(mount / "run"), store={"retry_seconds": 0})
    root = open_output(config)
    mount.rename(tmp_path / "away")
    with pytest.raises(Unavailable, match="expected the folder, which existed before"):
        open_or_start_run(config, root, {"model": "m", "layers": [1]})
    assert not mount.exists()


class Late(LocalStore):
    """Answers twice that there is no run. Another driver starts it between check and start."""

    asked = 0

    def get(self, name, most=None):
        if name == "run.json" and self.asked < 2:
            self.asked += 1
            raise NotFound(name)
        return super().get(name, most)


def test_a_job_that_is_submitted_twice_goes_on_with_the_run_of_the_quicker_one(tmp_path):
    start_run(LocalStore(tmp_path), {"meaning": {"model": "m", "layers": [1]}})
    opened(tmp_path, store=Late(tmp_path))
    with pytest.raises(RunMismatch, match="layers"):
        opened(tmp_path, store=Late(tmp_path), layers=[2])


class Replacing(LocalStore):
    """A store that ignores the condition of a put, as some S3 servers do."""

    def put_if_absent(self, name, data):
        self.put(name, [data])


def test_a_store_without_conditional_puts_is_refused_before_anything_is_stored(tmp_path):
    with pytest.raises(ConfigError, match="single_driver=true"):
        opened(tmp_path, store=Replacing(tmp_path))
    assert list(LocalStore(tmp_path).list()) == []
    opened(tmp_path, store=Replacing(tmp_path), single_driver=True)
    opened(tmp_path, store=Replacing(tmp_path))  # the run exists: a driver with nothing to do may only read
