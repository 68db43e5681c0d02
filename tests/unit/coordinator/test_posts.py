"""The bulletin board: what every worker has posted, all are told at once, and for good."""

from __future__ import annotations

A, B, C = ({"address": name} for name in "abc")


def test_posts_are_told_when_the_last_is_there(job):
    job.report(20, post=A)
    assert "posts" not in job.view.settings
    job.clear()
    job.report(21, post=B)
    assert job.view.settings["posts"] == {0: A, 1: B}
    assert all(job.told(node) == [job.view] for node in (20, 21))


def test_a_post_of_one_that_died_before_all_were_there_is_its_successors(job):
    job.report(20, post=A)
    job.lose(20)
    job.report(21, post=B)
    job.join(22, "worker", 0)
    assert "posts" not in job.view.settings
    job.report(22, post=C)
    assert job.view.settings["posts"] == {0: C, 1: B}


def test_what_was_told_stays(job):
    job.report(20, post=A)
    job.report(21, post=B)
    job.lose(20)
    job.join(22, "worker", 0)
    job.report(22, post=C)
    after = job.successor()
    after.coordinator.on_tick(after.now)
    assert job.view.settings["posts"] == after.view.settings["posts"] == {0: A, 1: B}


def test_only_workers_post_and_only_tables(job):
    job.report(10, post=C)
    job.report(20, post=A)
    job.report(21, post="b")
    assert "posts" not in job.view.settings
