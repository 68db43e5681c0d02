"""The glossary stays true: few words, each found where it says, and none where it would mean something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
MOST_WORDS = 30
VERBS = {"place"}
"""Words of the glossary that are verbs, too, at the beginning of a function's name: `place_shards`."""


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
ENTRIES = [(row[0].strip("*"), row[1], quoted(row[2])) for row in ROWS if row[0].startswith("**")]
STRAYS = {row[0]: quoted(row[1]) for row in ROWS if not row[0].startswith("**") and row[0] != "word"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def declared() -> set[str]:
    """Every class and name of a module, and what a class declares as `Class.name`."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        module = tree_of(path)
        found |= names_declared(module.body)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{name}" for name in names_declared(node.body)}
    return found


def names_declared(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def identifiers(module: ast.Module) -> Iterator[str]:
    """Every name that code uses or declares; not what stands in its sentences."""
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                yield name


@cache
def names_in(folder: str) -> frozenset[str]:
    files = list((SOURCE / folder).rglob("*.py"))
    assert files, f"docs/glossary.md names the folder {folder}, which has no code"
    return frozenset(name for path in files for name in identifiers(tree_of(path)))


def words_of(name: str) -> list[str]:
    """`SharedFirstLevel` and `_first_level` have the same words."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def says(name: str, word: str) -> bool:
    """Whether a name has this noun, in the singular or plural; `in_place` and `place_shards` have none."""
    words = words_of(re.sub(r"(in|of)_place$", "", name, flags=re.IGNORECASE))
    if word in VERBS and words[:1] == [word] and len(words) > 1 and name.islower():
        words = words[1:]
    return word in words or f"{word}s" in words


def test_the_words_are_few_and_each_is_there_once() -> None:
    words = [word for word, _, _ in ENTRIES]
    assert 20 <= len(words) == len(set(words)) <= MOST_WORDS


@pytest.mark.parametrize(("word", "meaning"), [(word, meaning) for word, meaning, _ in ENTRIES])
def test_a_meaning_is_a_sentence_or_two(word: str, meaning: str) -> None:
    plain = re.sub(r"\([^)]*\)", "", meaning)  # an aside says what a word means elsewhere
    assert 1 <= len(re.findall(r"\.(?:\s|$)", plain)) <= 2
    assert len(plain) < 220


@pytest.mark.parametrize(("word", "where"), [(word, where) for word, _, where in ENTRIES])
def test_a_word_is_found_where_it_says(word: str, where: list[str]) -> None:
    assert where, "every word says where it is found"
    missing = [name for name in where if not name.endswith("/") and name not in declared()]
    missing += [name for name in where if name.endswith("/") and not (SOURCE / name).is_dir()]
    assert missing == []


def test_code_uses_the_words() -> None:
    names = names_in("")
    assert [word for word, _, _ in ENTRIES if not any(says(name, word.replace("-", "")) for name in names)] == []


@pytest.mark.parametrize("word", STRAYS)
def test_a_word_does_not_stray(word: str) -> None:
    assert word in {entry for entry, _, _ in ENTRIES} and STRAYS[word]
    found = {folder: sorted(name for name in names_in(folder) if says(name, word)) for folder in STRAYS[word]}
    assert {folder: names for folder, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        ("places", True),
        ("_first_place", True),
        ("PlaceMoves", True),
        ("FIRST_PLACE", True),
        ("place_shards", False),
        ("place_of_places", True),
        ("_works_in_place", False),
        ("IN_PLACE", False),
        ("replace", False),
        ("placement", False),
    ],
)
def test_how_names_are_read(name: str, is_said: bool) -> None:
    assert says(name, "place") is is_said


def test_readers_find_the_page() -> None:
    for page in ("README.md", "docs/architecture.md"):
        assert "glossary.md)" in (REPOSITORY / page).read_text(encoding="utf-8"), page
