"""200 torn checkpoints: each is recognised, said, and the one before it used."""

from __future__ import annotations

import random
import shutil

import pytest

from helpers.checkpoint_states import assert_same, state
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError

NUM_TORN = 200


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two whole checkpoints, of several chunks each."""
    store = CheckpointStore(tmp_path_factory.mktemp("saved") / "checkpoints", chunk_bytes=8192)
    for step in (10, 20):
        store.save(state(step))
    return store


def pick(folder, dice):
    return dice.choice(sorted(folder.iterdir()))


def cut(folder, dice):
    victim = pick(folder, dice)
    data = victim.read_bytes()
    victim.write_bytes(data[: dice.randrange(len(data))])


def flip_a_bit(folder, dice):
    victim = pick(folder, dice)
    data = bytearray(victim.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    victim.write_bytes(data)


def lengthen(folder, dice):
    with pick(folder, dice).open("ab") as file:
        file.write(dice.randbytes(dice.randint(1, 64)))


def lose_a_file(folder, dice):
    pick(folder, dice).unlink()


def empty_the_manifest(folder, dice):
    (folder / "manifest.json").write_bytes(b"")


def swap_files(folder, dice):
    one, other = dice.sample(sorted(folder.iterdir()), 2)
    spare = folder / "spare"
    one.rename(spare), other.rename(one), spare.rename(other)


def take_from_the_one_before(folder, dice):
    victim = pick(folder, dice)
    shutil.copy(folder.with_name("step-000000010") / victim.name, victim)


def scribble(folder, dice):
    victim = pick(folder, dice)
    victim.write_bytes(dice.randbytes(victim.stat().st_size))


DAMAGES = (
    cut,
    flip_a_bit,
    lengthen,
    lose_a_file,
    empty_the_manifest,
    swap_files,
    take_from_the_one_before,
    scribble,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_torn_checkpoint_is_recognised(saved, tmp_path, damage):
    each = NUM_TORN // len(DAMAGES)
    for seed in range(each):
        dice = random.Random(f"{damage.__name__} {seed}")
        store = CheckpointStore(tmp_path / str(seed))
        shutil.copytree(saved.folder, store.folder)
        torn = store.folder / "step-000000020"
        damage(torn, dice)
        said = []
        assert_same(store.latest(said.append), state(10))
        assert len(said) == 1 and f"Checkpoint {torn} is torn: " in said[0], said
        for entry in store.entries():
            if entry.path == torn:
                with pytest.raises(CheckpointError, match="is torn"):
                    store.load(entry)
        shutil.rmtree(store.folder)


def test_where_none_is_whole_all_are_named(saved, tmp_path):
    store = CheckpointStore(tmp_path / "all")
    shutil.copytree(saved.folder, store.folder)
    for path in store.folder.iterdir():
        (path / "optimizer.bin").unlink()
    said = []
    assert store.latest(said.append) is None
    assert [("step-000000020" in text, "optimizer.bin: it is missing" in text) for text in said] == [
        (True, True),
        (False, True),
    ]
