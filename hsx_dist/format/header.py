"""The safetensors header of a part: built from a description, and refused by readers unless it matches one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.description import (
    FORMAT,
    FORMAT_OF_POINTS,
    MAX_HEADER_BYTES,
    Description,
    Tensor,
    plain_description,
)
from hsx_dist.format.description_text import parse_description
from hsx_dist.format.json_objects import STRING, check_containers, check_depth, parse_json, shown
from hsx_dist.format.segment_info import typed_member
from hsx_dist.text import head

#: The largest tensor begins at a multiple of this, so that mapped memory and direct disk I/O need no copy to align it.
_PAGE_BYTES = 4096
#: A header has few other lists, objects and members than those of its tensors.
_FEW, _BYTES_OF_A_CONTAINER = 64, 16
#: Members of each tensor. Their names take memory once.
_OF_TENSOR = ("dtype", "shape", "data_offsets")
#: The same members as our writer writes them. In JSON, these texts are nothing else.
_WRITTEN = (b'{"dtype":', b',"shape":', b',"data_offsets":')
_DESCRIPTION = b'"hsx":"'
#: Parts with less data are not aligned to a page, as the padding would be too large a share.
_WORTH_A_PAGE = 1 << 20


class Origin(NamedTuple):
    """``about``: the run's description when it wrote the object. ``meta``: of the first segment."""

    about: Mapping[str, Any]
    meta: Mapping[str, Any]


def build_header(description: Description) -> bytes:
    """Length field, JSON and padding. ``ValueError`` when the header is larger than safetensors allows."""
    text = description.to_json()
    entries: dict[str, Any] = {
        "__metadata__": {"format": description.format, "hsx": text, "hsx_crc32c": crc32c_hex(crc32c(text.encode()))}
    }
    entries |= {name: _entry(tensor) for name, tensor in description.tensors.items()}
    body = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    body += b" " * _padding(8 + len(body), description)
    if len(body) > MAX_HEADER_BYTES:
        raise ValueError(
            f"expected a header of at most {MAX_HEADER_BYTES} bytes, the limit of safetensors, got {len(body)} for "
            f"{len(description.segments)} segments. Put fewer segments into a part"
        )
    return struct.pack("<Q", len(body)) + body


def _padding(nbytes: int, description: Description) -> int:
    """Number of blanks after ``nbytes`` of header. They align every tensor for its type, and a large one to a page."""
    if description.data_bytes >= _WORTH_A_PAGE:
        begin, _ = max((place for _, _, place in description.tensors.values()), key=lambda place: place[1] - place[0])
        if begin % 8 == 0:
            return -(nbytes + begin) % _PAGE_BYTES
    return -nbytes % 8


def parse_header(body: bytes, data_bytes: int) -> tuple[Description, Mapping[str, Tensor]]:
    """Parse the header in ``body`` (JSON, padded) of an object with ``data_bytes`` after it.

    Returns:
        The description, and by name the dtype, shape and place within the data of each tensor.

    Raises:
        FormatError: the table or the data's length differs from the description's.
        IntegrityError: the description's checksum does not match.
    """
    entries, metadata = _parsed(body)
    # Accept no other metadata: a part with damaged metadata must not be read as a file without checksums.
    if not metadata or (metadata.keys() == {"format"} and metadata["format"] in ("pt", "np")):
        table = {name: _tensor(name, entry) for name, entry in entries.items()}
        description = plain_description(table)
        _check_plain(description, table, data_bytes)
        return description, table
    version, text = _described(metadata)
    description = Description.from_json(text, len(entries))
    if description.format != version:
        raise FormatError(f"expected format {description.format!r}, as in the description, got {version!r}")
    _check_table(entries, description.tensors)
    if data_bytes != description.data_bytes:
        raise FormatError(f"expected {description.data_bytes} bytes of data, got {data_bytes}: cut short or extended")
    return description, description.tensors


def parse_origin(body: bytes) -> Origin:
    """What the header in ``body`` says about its sample. The codec may be unknown here. Raises like ``parse_header``,
    but does not compare the table with the description."""
    entries, metadata = _parsed(body)
    found = parse_description(_described(metadata)[1], len(entries))
    about, segments = typed_member(found, "about", dict), typed_member(found, "segments", list)
    check_depth(about, "the description")
    if not segments:
        raise FormatError("segments: expected at least one, got 0")
    return Origin(about, typed_member({"meta": {}, **segments[0]}, "meta", Mapping))


def _parsed(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of the tensors, and the metadata."""
    _check_containers(body)
    entries = parse_json(body, floats=False)
    if not isinstance(entries, dict):
        raise FormatError(f"expected a JSON object as header, got {shown(entries)}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"expected a JSON object as __metadata__, got {shown(metadata)}")
    return entries, metadata


def _described(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """The format's version, and the description's text."""
    version = metadata.get("format")
    if version not in (FORMAT, FORMAT_OF_POINTS):
        expected = f"{FORMAT!r} or {FORMAT_OF_POINTS!r}"
        raise FormatError(f"expected format {expected}, got {shown(version)}. Use a newer hsx_dist")
    text = metadata.get("hsx")
    if not isinstance(text, str) or not text.isascii():  # other characters take up to four times the memory
        raise FormatError("expected a description in ASCII under 'hsx' in __metadata__, got another value")
    crc = crc32c_hex(crc32c(text.encode("utf-8", "surrogatepass")))
    if metadata.get("hsx_crc32c") != crc:
        raise IntegrityError(
            f"description: expected crc32c {shown(metadata.get('hsx_crc32c'))}, got {crc}: the description changed. "
            "Restore the object, or delete it and compute its samples again"
        )
    return version, text


def _check_containers(body: bytes) -> None:
    """Raise ``FormatError`` for more lists, objects and members than tensors need: 3 lists and objects in at least 50
    bytes, and one member besides ``_OF_TENSOR``."""
    most = _FEW + len(body) // _BYTES_OF_A_CONTAINER
    # Quick for a part of our own: brackets and colons in the description, which is a string, do not count.
    found = body.find(_DESCRIPTION)
    if found >= 0 and (text := STRING.match(body, found + len(_DESCRIPTION) - 1)) is not None:
        begin, end = text.span()

        def outside(*texts: bytes) -> int:
            return sum(body.count(b, 0, begin) + body.count(b, end) for b in texts)

        if outside(b"[", b"{") <= most and outside(b":") - outside(*_WRITTEN) <= most:
            return
    check_containers(body, most, "header", besides=_OF_TENSOR)


def _entry(tensor: Tensor) -> dict[str, Any]:
    dtype, shape, offsets = tensor
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _check_table(entries: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Require the table that the description results in. Another reader might trust a table with other entries."""
    wrong = [name for name, tensor in expected.items() if entries.get(name) != _entry(tensor)]
    if wrong or len(entries) != len(expected):
        name = min([*wrong, *(entries.keys() - expected.keys())])
        wanted = _entry(expected[name]) if name in expected else "none"
        raise FormatError(
            f"tensor {head(name, 80)!r}: expected {wanted}, as in the description, got "
            f"{head(str(entries.get(name)), 160)}"
        )


def _tensor(name: str, entry: Any) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if len(entry) == 3:
            if all(type(v) is int and v >= 0 for v in (*shape, begin, end)) and begin <= end:
                return dtype, tuple(shape), (begin, end)
    raise FormatError(f"tensor {head(name, 80)!r}: expected dtype, shape and data_offsets, got {shown(entry)}")


def _check_plain(description: Description, table: Mapping[str, Tensor], data_bytes: int) -> None:
    for name, (dtype, shape, (begin, end)) in description.tensors.items():
        got = table.get(name)
        if got is None or got[:2] != (dtype, shape) or got[2][1] - got[2][0] != end - begin:
            raise FormatError(
                f"tensor {name!r}: expected {dtype} {list(shape)} in {end - begin} bytes, got {head(str(got), 160)}"
            )
    last = 0
    for name, (_, _, (begin, end)) in sorted(table.items(), key=lambda item: item[1][2]):
        if begin != last:
            raise FormatError(
                f"tensor {head(name, 80)!r}: expected to begin at {last}, the end of the tensor before, got {begin}"
            )
        last = end
    if last != data_bytes:
        raise FormatError(f"expected {last} bytes of data, got {data_bytes}: cut short or extended")
