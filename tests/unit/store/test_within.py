from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.errors import ConfigError
from hsx_dist.store.within import place_within


@pytest.mark.parametrize(
    ("prefix", "place"),
    [
        ("s3://bucket", "s3://bucket/x.safetensors"),
        ("s3://bucket/a/", "s3://bucket/a/b/x y%2F..@z.safetensors"),
        ("S3://bucket/a", "s3://bucket/a/x"),
        ("gs://bucket/a", "gs://bucket/a/.x"),
        ("http://127.0.0.1:9000/a", "http://127.0.0.1:9000/a/x%20y"),
        ("memory://a", "memory://a/b"),
    ],
)
def test_a_url_under_the_prefix_is_returned(prefix: str, place: str) -> None:
    assert place_within(prefix, place) == place


@pytest.mark.parametrize(
    ("prefix", "place"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("s3://bucket/a", "s3://bucket/a/"),
        ("s3://bucket/a", "s3://bucket/ab/x"),
        ("s3://bucket/a", "s3://bucket/b/x"),
        ("s3://bucket/a", "s3://bucket2/a/x"),
        ("s3://bucket", "s3://bucket2/x"),
        ("s3://bucket", "s3://bucket@evil/x"),
        ("s3://bucket/a", "s3://key:secret@bucket/a/x"),
        ("s3://bucket/a", "gs://bucket/a/x"),
        ("s3://bucket/a", "s3://bucket/a/../b/x"),
        ("s3://bucket/a", "s3://bucket/a/./x"),
        ("s3://bucket/a", "s3://bucket/a//x"),
        ("s3://bucket/a", "s3://bucket/a/x?versionId=3"),
        ("s3://bucket/a", "s3://bucket/a/x#y"),
        ("s3://bucket/a", "s3://bucket/a/x\\y"),
        ("s3://bucket/a", "s3://bucket/a/x\ny"),
        ("s3://bucket/a", "s3://bucket/a/x::file:///etc/passwd"),
        ("s3://bucket/a", "simplecache::s3://bucket/a/x"),
        ("s3://bucket/a", "zip://s3://bucket/a/x"),
        ("s3://bucket/a", "/etc/passwd"),
        ("s3://bucket/a", "file:///etc/passwd"),
        ("s3://bucket/a", "x"),
        ("s3://bucket/a", ""),
        ("s3://", "s3://bucket/x"),
        ("http://h/a", "http://h/a/%2e%2e/b"),
        ("http://h/a", "http://h/a/..%2Fb"),
        ("http://h/a", "http://h:80/a/x"),
        ("/data/a", "s3://bucket/data/a/x"),
        ("/data/a", "http://h/data/a/x"),
        ("/data/a", "/data/ab/x"),
        ("/data/a", "/data/a"),
        ("/data/a", "/data/a/../b"),
        ("/data/a", "/data/a/.."),
        ("/data/a", "~/x"),
        ("/data/a", "/data/a/x\0y"),
        ("/data/a", "file://data/a/x"),
    ],
)
def test_any_other_place_is_refused(prefix: str, place: str) -> None:
    with pytest.raises(ConfigError, match="expected a place under it") as e:
        place_within(prefix, place)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("place", [None, 3, b"s3://bucket/a/x", ["s3://bucket/a/x"], {}])
def test_a_place_is_a_text(place: object) -> None:
    with pytest.raises(ConfigError, match="the name of a place"):
        place_within("s3://bucket/a", place)


def test_links_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    (real / "inner").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "prefix").symlink_to(real)
    (real / "in").symlink_to(real / "inner")
    (real / "out").symlink_to(other)
    (real / "x.safetensors").symlink_to(real / "inner" / "y")
    prefix = str(tmp_path / "prefix")
    assert place_within(prefix, f"{prefix}/a") == str(real / "a")
    assert place_within(prefix, f"file://{real}/in/a") == str(real / "inner" / "a")
    assert place_within(f"file://{prefix}", str(real / "a")) == str(real / "a")
    for place in (real / "out" / "a", real / "x.safetensors", real / "out", other / "a"):
        with pytest.raises(ConfigError):
            place_within(prefix, str(place))
    monkeypatch.chdir(tmp_path)
    assert place_within("prefix", "prefix/a") == str(real / "a")
