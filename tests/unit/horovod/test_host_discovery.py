"""How many workers an elastic run should have, by the script that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import LaunchError
from shoal.horovod.elastic.driver import ElasticLimits


def wanted(script: Path) -> int:
    return ElasticLimits(workers=2, most=4, discovery_script=str(script)).wanted()


def script(folder: Path, text: str) -> Path:
    path = folder / "hosts.sh"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_slots_are_added_up_to_the_most(tmp_path):
    assert wanted(script(tmp_path, "#!/bin/sh\necho localhost:2\necho localhost\n")) == 3
    assert wanted(script(tmp_path, "#!/bin/sh\necho localhost:9\n")) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be run .No such file"),
        ("echo localhost:2", "cannot be run .Exec format error"),
        ("#!/bin/sh\necho localhost:many", "should print lines like localhost:2"),
        ("#!/bin/sh\nexit 3", "exit status 3"),
    ],
)
def test_a_script_that_says_nothing_is_named(text, sentence, tmp_path):
    path = tmp_path / "none.sh" if text is None else script(tmp_path, text)
    with pytest.raises(LaunchError, match=sentence):
        wanted(path)
