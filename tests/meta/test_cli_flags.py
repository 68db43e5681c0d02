"""The command line as promised: verbs, flags, help for each, and every command that the documents show."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from rich.emoji import Emoji
from typer.testing import CliRunner

from shoal.cli import VERBS_WITH_WORKERS, needs_zygote
from shoal.cli.app import app
from shoal.cli.help_texts import flowing
from shoal.observe.report import command
from shoal.spec import Cluster, Job

REPOSITORY = Path(__file__).parents[2]
FLAGS = {
    "train": "workers strategy slots spares on-failure max-failures chaos threads device port memory on "
    "interface ports trusted-network link store grace hosts ps_hosts worker_hosts job_name task_index arg "
    "batch-size epochs max-steps seed accumulate evaluate-every fold "
    "skip-loss-below loaders precision privacy recompute compile no-compile graph no-graph memory-format "
    "products convolutions loss-in-pieces no-loss-in-pieces flat-update no-flat-update offload fast sync-device "
    "no-sync-device from skip-seen checkpoint archive resume trust name runs overwrite again log tensorboard "
    "explain progress plain json help",
    "evaluate": "data workers strategy threads device memory on interface ports trust progress plain json help",
    "predict": "out data input workers strategy threads device memory on interface ports trust progress plain "
    "help",
    "export": "to out trust help",
    "run": "workers strategy servers on interface ports trusted-network link port threads horovod help",
    "scale": "workers servers hosts runs json help",
    "host": "join ticket name cores workers interface ports owner probe joined help",
    "slurm": "nodes hosts time partition gpus cpus sbatch requeue no-requeue name runs dry-run help",
    "k8s": "image hosts name runs namespace cores ram gpus env volume kind runtime port restarts out help",
    "submit": "on wait no-wait runs help",
    "verify": "workers strategy slots steps arg seed seeds precision privacy compile no-compile memory-format "
    "products convolutions loss-in-pieces no-loss-in-pieces replay trust json help",
    "bench": "workers strategies threads device rounds steps seconds arg batch-size seed precision out json help",
    "doctor": "json help",
    "federated": "help",
    "federated serve": "ticket out at versions steps buffer oldest clip rate arg resume help",
    "federated join": "arg timeout help",
    "kv": "help",
    "kv serve": "at number key store dead-after help",
    "checkpoint": "help",
    "checkpoint ls": "runs json help",
    "checkpoint show": "tensors runs json help",
    "checkpoint verify": "runs json help",
    "checkpoint export": "optimizer runs json help",
    "checkpoint diff": "runs json help",
}
ROOT = typer.main.get_command(app)


def command_of(verb):
    """A verb's command, or that of a verb of a verb."""
    found = ROOT
    for word in verb.split():
        found = found.commands[word]
    return found


def options(verb):
    command = command_of(verb)
    return command.get_params(command.make_context(verb, [], resilient_parsing=True))


def test_verbs():
    assert set(ROOT.commands) == {verb.split()[0] for verb in FLAGS}
    for group in ("checkpoint", "kv"):
        assert {f"{group} {verb}" for verb in ROOT.commands[group].commands} < set(FLAGS)
    assert set(VERBS_WITH_WORKERS) <= set(FLAGS)


@pytest.mark.parametrize("verb", FLAGS)
def test_flags_and_their_help(verb):
    given = options(verb)
    flags = {name for param in given for name in (*param.opts, *param.secondary_opts) if name.startswith("--")}
    assert flags == {f"--{name}" for name in FLAGS[verb].split()}
    for param in given:
        text = getattr(param, "help", None)
        assert text, f"{verb}: {param.name} has no help"
        assert Emoji.replace(text) == text, f"{verb}: the help of {param.name} is shown with a picture in it"
    assert "shoal " in (command_of(verb).help or ""), f"{verb}: its help shows no example"


@pytest.mark.parametrize("verb", FLAGS)
def test_help_fits_a_terminal_of_80_columns(verb):
    narrow, wide = (
        CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": columns}).output
        for columns in ("80", "400")
    )
    assert narrow.count("…") == wide.count("…"), "a word is longer than its column"
    assert max(map(ord, narrow)) < 0x1F000, "what stands between two colons is taken for the name of a picture"


def test_sentences_of_a_help_text_are_broken_by_the_terminal_alone():
    text = flowing("""Do it.

    This is
    one sentence.

    shoal verb one
    shoal verb two
    """)
    assert text == "Do it.\n\nThis is one sentence.\n\nshoal verb one\nshoal verb two"
    assert flowing("Say it:\nnow.") == "Say it: now."
    verify = command_of("verify").help
    assert "with those of synchronous training over several seeds" in verify


def documented_commands():
    """Every line of the documents that is a command of a verb that exists."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("examples/*.py")]
    for page in (*pages, REPOSITORY / "Makefile"):
        for line in re.findall(r"^[ \t$]*(?:\$\(BIN\)/)?shoal ([a-z]+\b[^\n`]*)", page.read_text(), re.MULTILINE):
            # A diagram goes on behind a gap.
            yield page.name, shlex.split(re.split(r"\s{2,}", line)[0], comments=True)


@pytest.mark.parametrize(("page", "words"), list(documented_commands()), ids=str)
def test_documented_commands_parse(page, words):
    verb, *rest = words
    if verb in ("checkpoint", "federated", "kv"):
        verb, rest = " ".join(words[:2]), words[2:]
    assert verb in FLAGS, f"{page} shows `shoal {verb}`"
    context = command_of(verb).make_context(verb, rest)
    assert context.params


def test_the_report_repeats_a_run_with_real_flags():
    job = Job(
        target="digits.py:task",
        args={"width": 8, "lr": 0.5, "on": True},
        strategy="data:via=arena",
        cluster=Cluster(workers=3, spares=1, threads=2, port=4000),
        slots=6,
        overrides={
            "batch_size": 8,
            "epochs": 2,
            "max_steps": 3,
            "seed": 4,
            "accumulate": 2,
            "evaluate_every": 9,
            "fold": "2/5",
        },
    )
    program, verb, *rest = shlex.split(command(job))
    assert (program, verb) == ("shoal", "train")
    params = ROOT.commands["train"].make_context(verb, rest).params
    assert params["target"] == job.target
    assert {name: params[name] for name in job.overrides} == job.overrides
    found = [params[name] for name in ("strategy", "workers", "spares", "threads", "port", "slots")]
    assert found == [job.strategy, 3, 1, 2, 4000, 6]
    assert params["arg"] == ["width=8", "lr=0.5", "on=True"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], False),
        (["--version"], False),
        (["train", "x.py"], True),
        (["train", "--help"], False),
        (["run", "--help"], False),
        (["run", "x.py", "--help"], True),
        (["doctor"], False),
    ],
)
def test_a_zygote_is_started_only_where_workers_are_wanted(words, wanted, monkeypatch):
    monkeypatch.delenv("SHOAL_ZYGOTE", raising=False)
    assert needs_zygote(words) is wanted
    monkeypatch.setenv("SHOAL_ZYGOTE", "there-is-one")
    assert needs_zygote(words) is False
