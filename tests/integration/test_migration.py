"""What the migration pages show side by side: both sides run where they can, and come to the same."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.commands import GUARD_S, environment
from helpers.warm_commands import Answer, WarmCommands
from shoal.launch.owner import ZygoteProcess
from shoal.spec import parse_strategy

FOLDER = Path(__file__).parents[2] / "docs" / "migration"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = ("ddp", "accelerate", "lightning", "horovod", "tensorflow", "mxnet", "keras")
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
BEFORE, AFTER = "What you wrote", "What you write"
SAME = 1e-6
IN_FLOAT64 = """
import runpy, sys
import shoal.keras
from shoal.keras.installed import in_numbers, wide

with in_numbers("float64"), wide():
    runpy.run_path(sys.argv[1], run_name="__main__")
"""


def sections(page: str) -> dict[str, list[str]]:
    """What stands between fences, by the heading above it."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: FENCE.findall(part) for part in parts}


def files(page: str) -> dict[str, str]:
    """By name, the data that all pages share among them."""
    blocks = [*FENCE.findall(INDEX), *(block for blocks in sections(page).values() for block in blocks)]
    return {name[1]: block for block in blocks if (name := FILE.match(block))}


def commands(page: str, heading: str) -> list[list[str]]:
    lines = [line for block in sections(page)[heading] if not FILE.match(block) for line in block.splitlines()]
    assert lines and all(line.startswith("$ ") for line in lines)
    return [shlex.split(line[2:]) for line in lines]


def write(page: str, folder: Path) -> None:
    """Leave the files of a page there."""
    for name, text in files(page).items():
        (folder / name).write_text(text)


def loss_of(answer: Answer, line: list[str]) -> float:
    """What a command came to, in every process that says so."""
    assert answer.status == 0, f"{line}\n{answer.text}"
    if line[1] == "train":
        return float(answer.result["results"]["loss"])
    found = {float(each) for each in re.findall(r"loss (\d\.\d+)", answer.out)}
    assert len(found) == 1, answer.text
    return found.pop()


@pytest.fixture(scope="module")
def expected() -> float:
    """What one process comes to with a loop of torch's own."""
    made: dict[str, object] = {}
    exec(files("ddp")["clouds.py"], made)
    points, net = made["points"], made["net"]
    assert callable(points) and callable(net)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, target = points(192, 1)[:]
    for _ in range(3):
        for start in range(0, 192, 32):
            optimizer.zero_grad()
            rows = slice(start, start + 32)
            nn.functional.cross_entropy(model(inputs[rows]), target[rows]).backward()
            optimizer.step()
    inputs, target = points(96, 2)[:]
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), target))


def test_every_page_has_both_sides_and_is_linked():
    assert {path.stem for path in FOLDER.glob("*.md")} == {*PAGES, "README"}
    for page in PAGES:
        assert f"({page}.md)" in INDEX
        assert {BEFORE, AFTER} <= set(sections(page))
        for name, text in files(page).items():
            compile(text, name, "exec")
        theirs = ast.parse(files(page)["before.py"])
        names = [alias.name for node in ast.walk(theirs) if isinstance(node, ast.Import) for alias in node.names]
        assert not any(name.startswith("shoal") for name in names)


def test_every_strategy_that_is_named_exists():
    found = {name: re.findall(r"--strategy ([\w:=,.]+)", (FOLDER / f"{name}.md").read_text()) for name in PAGES}
    assert sum(map(len, found.values())) > 8
    for names in found.values():
        for name in names:
            parse_strategy(name)


def run_ours(
    warm_commands: WarmCommands, folder: Path, page: str, headings: tuple[str, ...], expected: float
) -> None:
    """What Shoal runs on a page comes to what one process does."""
    for heading in headings:
        for program, verb, *words in commands(page, heading):
            assert program == "shoal"
            line = [program, verb, *words, *(["--json"] if verb == "train" else [])]
            found = loss_of(warm_commands(folder, *line[1:]), line)
            assert found == pytest.approx(expected, abs=SAME), line


def test_ddp_a_task_and_a_loop_come_to_the_same(
    tmp_path: Path, warm_commands: WarmCommands, expected: float
) -> None:
    write("ddp", tmp_path)
    # Started as by torchrun, whose variables it has: torch itself is what trains here.
    line = ["shoal", "run", "--workers", "2", "before.py"]
    assert loss_of(warm_commands(tmp_path, *line[1:]), line) == pytest.approx(expected, abs=SAME)
    run_ours(warm_commands, tmp_path, "ddp", (AFTER, "Or keep your loop"), expected)
    assert (tmp_path / "model.pt").exists() and (tmp_path / "model.safetensors").exists()


@pytest.mark.long
def test_torchrun_starts_both_loops(tmp_path: Path, zygote: ZygoteProcess, expected: float) -> None:
    write("ddp", tmp_path)
    ((program, *words, script),) = commands("ddp", BEFORE)
    assert (program, script) == ("torchrun", "before.py")
    for each in (script, "loop.py"):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, each],
            cwd=tmp_path,
            env={**environment(zygote), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=GUARD_S,
        )
        assert done.returncode == 0, done.stderr
        found = {float(one) for one in re.findall(r"loss (\d\.\d+)", done.stdout)}
        assert len(found) == 1 and found.pop() == pytest.approx(expected, abs=SAME)


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        pytest.param("accelerate", (AFTER,), marks=pytest.mark.long),
        ("lightning", (AFTER,)),
        ("horovod", (AFTER,)),
        pytest.param("horovod", ("Or leave Horovod behind",), marks=pytest.mark.long),
        pytest.param("mxnet", (AFTER,), marks=pytest.mark.long),
    ],
)
def test_what_others_start_comes_to_the_same(
    page: str, headings: tuple[str, ...], tmp_path: Path, warm_commands: WarmCommands, expected: float
) -> None:
    write(page, tmp_path)
    run_ours(warm_commands, tmp_path, page, headings, expected)


@pytest.mark.long
def test_fit_has_the_same_history_in_two_processes(tmp_path: Path, warm_commands: WarmCommands) -> None:
    """In float64, in which Keras on torch does not compute by itself."""
    write("keras", tmp_path)
    (tmp_path / "wide.py").write_text(IN_FLOAT64)
    ((_, *after),) = commands("keras", AFTER)
    assert after == ["run", "--workers", "2", "after.py"]
    before = warm_commands(tmp_path, "run", "wide.py", "before.py")
    both = warm_commands(tmp_path, "run", "--workers", "2", "wide.py", "after.py")
    assert before.status == both.status == 0, before.text + both.text
    (alone,), together = (
        [ast.literal_eval(one) for one in re.findall(r"{.*}", each.out)] for each in (before, both)
    )
    assert len(together) == 2 and set(alone) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    for history in together:
        assert history.keys() == alone.keys()
        for name, values in alone.items():
            assert history[name] == pytest.approx(values, rel=1e-9, abs=1e-9), name


@pytest.mark.long
def test_a_keras_model_learns_on_parameter_servers(tmp_path: Path, warm_commands: WarmCommands) -> None:
    write("tensorflow", tmp_path)
    ((_, *words),) = commands("tensorflow", AFTER)
    asynchronous = warm_commands(tmp_path, *words, "--json")
    assert asynchronous.status == 0, asynchronous.text
    assert asynchronous.result["results"]["accuracy"] > 0.85
    in_step = [word.replace("sync=asp", "sync=bsp") for word in words]
    one, two = (warm_commands(tmp_path, *line, "--json") for line in (["train", "after.py"], in_step))
    assert one.status == two.status == 0, one.text + two.text
    assert two.result["results"] == pytest.approx(one.result["results"], rel=1e-4)
