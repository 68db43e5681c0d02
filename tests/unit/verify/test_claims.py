"""What each strategy claims to compute."""

from __future__ import annotations

import pytest

from shoal.spec import Claim, parse_strategy


@pytest.mark.parametrize(
    ("strategy", "claim"),
    [
        ("data", Claim.BITS),
        ("data:via=ring", Claim.SUMS),
        ("sharded", Claim.SUMS),
        ("tensor", Claim.SUMS),
        ("pipeline", Claim.SUMS),
        ("mesh:data=2", Claim.SUMS),
        ("layer:place=left@0+right@1", Claim.SUMS),
        ("layer:phases=2", Claim.SUMS),
        ("layer:decoupled=on", Claim.RESULT),
        ("ps", Claim.BITS),
        ("ps:servers=3,sync=ssp:0,wire=tcp,compress=zstd", Claim.BITS),
        ("ps:sync=quorum:2/2", Claim.BITS),
        ("ps:sync=quorum:1/2", Claim.RESULT),
        ("ps:sync=ssp:1", Claim.RESULT),
        ("ps:sync=asp", Claim.RESULT),
        ("ps:sync=alternate:2", Claim.RESULT),
        ("ps:wire=tcp,compress=bf16", Claim.RESULT),
        ("ps:via=ring", Claim.SUMS),
        ("ps:via=router:1", Claim.SUMS),
        ("ps:sync=asp,pool=count:2", Claim.RESULT),
        ("ps:servers=host", Claim.SUMS),
        ("ps:servers=host,agree=scatter-sum", Claim.RESULT),
        ("ps:push=parameters", Claim.SUMS),
        ("ps:push=parameters,every=2", Claim.RESULT),
    ],
)
def test_two_workers_with_plain_sgd(strategy: str, claim: Claim) -> None:
    assert parse_strategy(strategy).claim(workers=2) is claim


def test_one_worker_has_nobody_to_be_late_for() -> None:
    assert parse_strategy("ps:sync=asp").claim(workers=1) is Claim.BITS
    # One that begins before its last push is applied is late for itself.
    assert parse_strategy("ps:sync=asp,ahead=1").claim(workers=1) is Claim.RESULT


def test_means_of_parameters_are_means_of_gradients_for_sgd_alone() -> None:
    assert parse_strategy("ps:push=parameters").claim(workers=2, optimizer="AdamW") is Claim.RESULT
