"""`python -m benchmarks`: every command that the documents show is one that it takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from benchmarks import __main__ as program
from shoal.errors import SpecError

ROOT = Path(__file__).parents[3]
COMMAND = typer.main.get_command(program.app)


def documented():
    for page in (ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "README.md"):
        text = re.sub(r"\n(?=--)", " ", page.read_text(encoding="utf-8"))  # a command in a sentence goes on below
        for words in re.findall(r"python -m benchmarks (--[^\n`]*)", text):
            yield shlex.split(words, comments=True)


@pytest.mark.parametrize("words", list(documented()), ids=" ".join)
def test_documented_commands_parse(words):
    assert COMMAND.make_context("benchmarks", words).params


def test_the_documents_show_some():
    assert len(list(documented())) >= 5


@pytest.mark.parametrize("words", [["--models", "mpl"], ["--models", "", "--chaos-runs", "kill"]], ids=" ".join)
def test_a_wrong_name_is_refused_before_anything_runs(words):
    with pytest.raises(SpecError, match="Did you mean"):
        COMMAND.main(words, standalone_mode=False)
