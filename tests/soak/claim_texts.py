"""Runs in which one stored text is long and odd, and every command on them."""

from __future__ import annotations

import json
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

from hsx_dist.format.checksum import crc32c, crc32c_hex
from tests.harness import runs as testing_runs
from tests.soak.claim_commands import run_command
from tests.soak.claim_kinds import Read, run_at, sealed
from tests.soak.mutations import spots

#: Units of texts that readers escape, search for credentials, split or draw.
ESCAPED = ["\x7f", "\x1b", "\u202e", "\n"]
UNITS = [*ESCAPED, "a", "ā", "\U0001f642", "<&", "'\"", "\\", "[bold]", "$x$", "%d", "{x}"]
UNITS += ["http://u:p@h/ ", "://", "password='", "&token=", "Bearer ", "-----BEGIN PRIVATE KEY-----", "../", "0"]
#: Bytes of a text in a part, and in a small object, which readers refuse above 4 MiB.
LONGEST, LONGEST_OF_SMALL = 5 << 20, 3_900_000


def texts(rng: random.Random, folder: Path) -> list[Read]:
    """A run in which one member, or one member's name, is long."""
    run = folder / "run"
    run_at(run, complete=False)
    name = rng.choice(["run.json", "attempts/0001.json", "attempts/0001.heartbeat.json", "receipt", "part", "part"])
    unit = rng.choice(rng.choice([ESCAPED, UNITS]))
    most = LONGEST if name == "part" else LONGEST_OF_SMALL
    stored = len(json.dumps(json.dumps(unit, ensure_ascii=False), ensure_ascii=False).encode()) - 6
    text = unit * (rng.choice([most, 1 << rng.randrange(10, 22)]) // max(stored, 1))
    if name == "part":
        _replace_in_part(run, text, rng)
    elif name == "receipt":
        path = run / "manifest/0001/w/000001.json"
        path.write_bytes(sealed(_with(json.loads(path.read_text())["receipt"], text, rng)))
    else:
        found = _with(testing_runs.unsealed((run / name).read_bytes()), text, rng)
        (run / name).write_bytes(json.dumps(found, ensure_ascii=rng.random() < 0.5).encode())
    return commands(folder)


def commands(folder: Path) -> list[Read]:
    """Every command that reads the run in ``folder``. Those that write are last."""
    run, out = str(folder / "run"), str(folder / "out")
    lines = [
        *(["ls"], ["show"], ["show", "a"], ["status"], ["verify"], ["gc", "--watch", "0"]),
        *(["top", "--once"], ["rm"], ["cat", "a", "-o", f"{out}.npz"], ["report", "-o", f"{out}.html"], ["stats"]),
        ["export", out, "--to", "vllm"],
    ]
    without_json = {"top", "rm", "cat", "report", "stats", "export"}
    lines += [[*line, "--json"] for line in lines if line[0] not in without_json]
    return [partial(run_command, [line[0], run, *line[1:]]) for line in lines]


def _with(value: Any, text: str, rng: random.Random) -> Any:
    """Replace a member of ``value``, or its name, by ``text``."""
    places = spots(value, [])
    container, key = rng.choice(
        [place for place in places if type(place[0][place[1]]) is str or rng.random() < 0.3] or places
    )
    if isinstance(container, dict) and rng.random() < 0.2:
        container[text] = container.pop(key)
    else:
        container[key] = text
    return value


def _replace_in_part(run: Path, text: str, rng: random.Random) -> None:
    """Replace a text in the part's description. Its checksums and its receipt are correct."""
    (path,) = (run / "data").iterdir()
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    table = json.loads(data[8 : 8 + length])
    about = table["__metadata__"]
    described = json.dumps(_with(json.loads(about["hsx"]), text, rng), separators=(",", ":"), ensure_ascii=False)
    about |= {"hsx": described, "hsx_crc32c": crc32c_hex(crc32c(described.encode()))}
    head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    made = struct.pack("<Q", len(head)) + head + data[8 + length :]
    path.write_bytes(made)
    receipt = run / "manifest/0001/w/000001.json"
    body = json.loads(receipt.read_text())["receipt"]
    body |= {"size": len(made), "header_bytes": 8 + len(head), "crc32c": crc32c_hex(crc32c(made))}
    receipt.write_bytes(sealed(body))
