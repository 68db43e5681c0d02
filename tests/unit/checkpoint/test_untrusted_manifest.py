"""A manifest with a right checksum may still lie: it is refused before memory is taken or a path followed."""

from __future__ import annotations

import json
import os
import random
from contextlib import contextmanager

import pytest

from helpers.checkpoint_states import assert_same, state
from shoal.checkpoint.fields import Malformed
from shoal.checkpoint.listing import list_entries
from shoal.checkpoint.manifest import checksum, parse_manifest
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError


@pytest.fixture
def entry(tmp_path):
    return CheckpointStore(tmp_path).save(state(10))


def read_body(entry):
    return json.loads((entry.path / "manifest.json").read_text())["manifest"]


def sealed(body):
    """The bytes of a manifest with this content and the checksum that belongs to it."""
    text = json.dumps(body).encode()
    return b'{"checksum": "' + checksum(text).encode() + b'", "manifest": ' + text + b"}\n"


def put(values, path, value):
    *way, last = path
    for key in way:
        values = values[key]
    values[last] = value


FIRST = ("files", "model", "places", 0)
LIES = [
    (("version",), 2),
    (("step",), -1),
    (("step",), 11),
    (("step",), True),
    (("digest",), None),
    (("digest",), "0" * 32),
    (("saved_at",), 1e300),
    (("seconds",), "1"),
    (("facts",), []),
    (("chunk_bytes",), 0),
    (("chunk_bytes",), 1 << 60),
    (("files",), {}),
    (("files", "../../model"), {"nbytes": 0, "checksums": [], "places": []}),
    (("files", "model", "nbytes"), 1 << 49),
    (("files", "model", "nbytes"), 1.5),
    (("files", "model", "checksums"), []),
    (("files", "model", "checksums"), [7]),
    (("files", "model", "places"), {"name": "tokens"}),
    (("files", "model", "places", 1, "name"), "tokens"),
    ((*FIRST, "name"), 7),
    ((*FIRST, "dtype"), "object"),
    ((*FIRST, "dtype"), "load"),
    ((*FIRST, "shape"), [1 << 40, 1 << 40]),
    ((*FIRST, "shape"), [0, 1 << 50, 1 << 50]),
    ((*FIRST, "shape"), [-700, -8]),
    ((*FIRST, "shape"), [1] * 100_000),
    ((*FIRST, "shape"), 5600),
    ((*FIRST, "offset"), 32),
    ((*FIRST, "offset"), -64),
    ((*FIRST, "offset"), 1 << 30),
    ((*FIRST, "nbytes"), 1 << 45),
    ((*FIRST, "nbytes"), 4),
]


@pytest.mark.parametrize(("path", "value"), LIES, ids=str)
def test_lies_are_refused(entry, path, value):
    body = read_body(entry)
    put(body, path, value)
    (entry.path / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match="is torn"):
        CheckpointStore(entry.path.parent).load(entry)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", '{"version": 1}', "{", "\xff"])
def test_what_is_no_manifest_is_refused(text):
    data = text.encode("latin-1")
    with pytest.raises(Malformed):
        parse_manifest(b'{"checksum": "' + checksum(data).encode() + b'", "manifest": ' + data + b"}\n")


def test_any_change_of_a_value_is_harmless_or_refused(entry):
    """Whatever one value of the manifest becomes, reading ends in order."""
    dice = random.Random(7)
    junk = [None, True, -1, 0, 1, 63, 64, 1 << 31, 1 << 63, 1e308, "", "model", [], [1 << 62], {}, {"name": 1}]
    genuine = read_body(entry)
    paths = list(leaves(genuine))
    for _ in range(300):
        body = json.loads(json.dumps(genuine))
        put(body, dice.choice(paths), dice.choice(junk))
        (entry.path / "manifest.json").write_bytes(sealed(body))
        list_entries(entry.path.parent)
        try:
            CheckpointStore(entry.path.parent).load(entry)
        except CheckpointError as error:
            assert "is torn" in str(error)


def leaves(value, path=()):
    """Every place in nested data."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


@contextmanager
def outside(entry, name):
    """The file, moved out of the checkpoint's folder."""
    place = entry.path.parent / "elsewhere"
    (entry.path / name).rename(place)
    yield place
    (entry.path / name).unlink()
    place.rename(entry.path / name)


@pytest.mark.parametrize("name", ["model.bin", "manifest.json"])
def test_a_file_that_leads_elsewhere_is_not_followed(entry, name):
    store = CheckpointStore(entry.path.parent)
    with outside(entry, name) as place:
        (entry.path / name).symlink_to(place)
        with pytest.raises(CheckpointError, match=f"{name}: Too many levels of symbolic links"):
            store.load(entry)
    with outside(entry, name):
        os.mkfifo(entry.path / name)
        with pytest.raises(CheckpointError, match=f"{name}: it is not a plain file"):
            store.load(entry)
    assert_same(store.load(entry), state(10))
