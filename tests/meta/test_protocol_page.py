"""The pages about the parameter server stay true: every message with its fields, every key, every limit."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from shoal.comm import codec
from shoal.coordinator.leases import AHEAD
from shoal.coordinator.plan import ADJUSTMENTS
from shoal.ps import messages
from shoal.ps.plain.messages import Ask
from shoal.ps.plain.messages import WishOutcome as Answered
from shoal.ps.plain.table import MOST_NAME_BYTES
from shoal.ps.primary import Primary
from shoal.ps.server import RUNS_PER_REPORT, SHARDS_PER_REPORT
from shoal.spec import ParameterServer
from shoal.spec.parameter_server import MOST_CELLS_PER_PUSH, MOST_SHARDS

DOCS = Path(__file__).parents[2] / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text(encoding="utf-8")
STRATEGY = (DOCS / "strategies" / "parameter-server.md").read_text(encoding="utf-8")


def section(page, title):
    """What stands under a heading, up to the next one."""
    return re.split(r"^#+ ", page.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    """The cells of all tables, row by row."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def shown(default):
    """A field's default as the page writes it; nothing where there is none."""
    return "" if default is MISSING else str(default).lower()


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


MESSAGE_ROWS = {
    quoted(row[0])[0]: row[2]
    for title in ("Worker and server", "Primary and backup", "Between shards", "Everybody and the coordinator")
    for row in rows(section(PROTOCOL, title))[1:]
}


def test_every_message_has_a_row_and_no_other():
    assert MESSAGE_ROWS.keys() == messages.KINDS.keys()


@pytest.mark.parametrize("kind", messages.KINDS)
def test_a_message_has_these_fields_and_defaults(kind):
    declared = [field for field in fields(messages.KINDS[kind]) if field.name != "frames"]
    written = re.findall(r"`(\w+)`(?: \(([^)]*)\))?", MESSAGE_ROWS[kind])
    assert written == [(field.name, shown(field.default)) for field in declared]


def test_every_field_is_explained():
    names = {field.name for cls in messages.KINDS.values() for field in fields(cls)} - {"frames"}
    explained = {name for row in rows(section(PROTOCOL, "Fields")) for name in quoted(row[0])}
    assert explained == names


def test_outcomes_roles_and_actions_are_named():
    explained = {quoted(row[0])[0]: row[2] for row in rows(section(PROTOCOL, "Fields"))[1:]}
    assert set(quoted(explained["outcome"])) == {outcome.value for outcome in messages.PushOutcome}
    assert set(quoted(explained["role"])) == {"server", "worker"}


def test_the_plain_objects_messages_are_named():
    named = {name for row in rows(section(PROTOCOL, "Plain objects")) for name in quoted(row[0])}
    assert named == {ask.value for ask in Ask} | {outcome.value for outcome in Answered}


def test_limits_are_those_of_the_code():
    limits = section(PROTOCOL, "Limits")
    for limit in (
        f"header of a packet | {codec.MAX_HEADER_BYTES >> 20} MiB;",
        f"frames of a packet | {codec.MAX_FRAMES} |",
        f"one frame | {codec.MAX_FRAME_BYTES >> 20} MiB;",
        f"shards of a model | {MOST_SHARDS}; a server reports on {SHARDS_PER_REPORT} at a time |",
        f"cells of a push | {MOST_CELLS_PER_PUSH} (",
        f"reported of a shard | {RUNS_PER_REPORT},",
        f"the first that is not done | {AHEAD} |",
        f"parameters | {MOST_NAME_BYTES >> 20} MiB together |",
        f"dimensions of a tensor | {codec.MAX_DIMS};",
        f"filled | {Primary.MAX_QUEUED} for each shard |",
    ):
        assert limit in limits


def test_every_key_of_the_strategy_has_a_row_with_its_default():
    written = {quoted(row[0])[0]: row[2] for row in rows(section(STRATEGY, "Keys"))[1:]}
    assert written.keys() == {field.name for field in fields(ParameterServer)}
    for field in fields(ParameterServer):
        shown = quoted(written[field.name])
        default = {True: "on", False: "off"}[field.default] if field.type == "bool" else str(field.default)
        assert not shown or shown == [default] or field.default == "auto", field.name


def test_every_adjustment_is_a_decision_with_a_row():
    decisions = {row[0] for row in rows(section(STRATEGY, "What the coordinator decides"))}
    assert {"rollback" if name == "divergence" else name for name in ADJUSTMENTS} <= decisions
