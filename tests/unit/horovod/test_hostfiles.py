"""What `horovodrun`'s hostfiles say, and what none can say."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.horovod.run import parser_of_horovodrun, slots_of_hosts


def hosts(*words: str) -> dict[str, int]:
    return slots_of_hosts(parser_of_horovodrun().parse_args([*words, "python", "train.py"]))


def test_a_hostfile_names_one_in_a_line(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=4\n# ours\n\nb   slots = 2  # small\nc\na slots=1\n")
    assert hosts("--hostfile", str(file)) == {"a": 5, "b": 2, "c": 1}
    assert hosts("-H", "a:4,b") == {"a": 4, "b": 1}


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        hosts("--hostfile", str(tmp_path / "none"))
    with pytest.raises(SpecError, match="found 'a:many'"):
        hosts("-H", "a:many")
