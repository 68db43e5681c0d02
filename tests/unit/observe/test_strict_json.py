"""What is written as JSON is JSON."""

from __future__ import annotations

import json
import math

import pytest

from shoal.observe.strict_json import to_json


def test_what_json_has_no_word_for_is_null() -> None:
    told = {"loss": math.nan, "rows": [(1, math.inf), (2, 0.5)], "inner": {"low": -math.inf}, "name": "NaN"}
    read = json.loads(to_json(told), parse_constant=pytest.fail)
    assert read == {"loss": None, "rows": [[1, None], [2, 0.5]], "inner": {"low": None}, "name": "NaN"}


def test_all_else_is_as_ever() -> None:
    told = {"loss": 0.25, "steps": [[1, 2.0]], "none": None, "yes": True, "text": "ü"}
    assert to_json(told, indent=2) == json.dumps(told, indent=2)
