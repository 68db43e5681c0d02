"""What can be written after `layer:`, and what it means for a job."""

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Job, Layer, LayerForm, parse_strategy


@pytest.mark.parametrize(
    ("written", "form", "slots"),
    [
        ("layer", LayerForm.PLACED, 1),
        ("layer:place=left@0+deep.er@1", LayerForm.PLACED, 1),
        ("layer:decoupled=on,weights=0.3+1", LayerForm.DECOUPLED, 1),
        ("layer:phases=2,every=5", LayerForm.PHASED, 2),
    ],
)
def test_forms(written, form, slots):
    spec = parse_strategy(written)
    assert isinstance(spec, Layer)
    assert (spec.form, spec.cuts_model) == (form, slots == 1)
    assert parse_strategy(str(spec)) == spec
    job = Job(target="x.py", strategy=written, cluster=Cluster(workers=2))
    assert job.num_slots == slots


def test_what_is_written_is_read():
    assert Layer(place="left@0+deep.er@1").homes == {"left": 0, "deep.er": 1}
    assert Layer(decoupled=True, weights="0.5+2").loss_weights(2) == (0.5, 2.0)
    assert Layer(decoupled=True).loss_weights(3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("layer:place=left", "place must be auto or like left@0"),
        ("layer:phases=1", "phases=1 has no turns"),
        ("layer:phases=2,decoupled=on", "decoupled and phases are different ways"),
        ("layer:place=a@0,phases=2", "place and phases are different ways"),
        ("layer:weights=1+1", "weights=1.1 acts only with decoupled=on"),
        ("layer:decoupled=on,weights=x", "weights must be 'even' or a number"),
        ("layer:phases=2,every=0", "every must be a whole number of at least 1"),
        ("layer:via=backend", "via 'backend' is not known"),
        ("layer:phases=2,via=sockets", "via=sockets acts only where the model is cut"),
    ],
)
def test_what_contradicts_itself(written, sentence):
    with pytest.raises(SpecError, match=sentence):
        parse_strategy(written)


@pytest.mark.parametrize(
    ("written", "changes", "sentence"),
    [
        ("layer:place=a@0+b@2", {}, "place has b@2, but the workers are 0 to 1"),
        ("layer:decoupled=on,weights=1+1+1", {}, "for 3 groups, but each of the 2 workers"),
        ("layer", {"slots": 2}, "slots=2, but strategy=layer cuts every batch into 1"),
        ("layer", {"on_failure": "shrink"}, "nobody else has"),
        ("layer:phases=2", {"on_failure": "shrink"}, "cannot replace workers"),
        ("layer:phases=2", {"slots": 1}, "fewer than workers=2"),
    ],
)
def test_what_a_job_cannot_do(written, changes, sentence):
    with pytest.raises(SpecError, match=sentence):
        Job(target="x.py", strategy=written, cluster=Cluster(workers=2), **changes)
