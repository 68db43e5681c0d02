import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Job


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1.5GiB", 3 << 29), ("800MB", 800_000_000), ("64 KiB", 65536), ("12B", 12), ("", None), ("2TiB", 2 << 40)],
)
def test_memory_as_it_is_written(text, expected):
    assert Cluster(memory=text).memory_bytes == expected


@pytest.mark.parametrize("text", ["much", "12", "GiB", "-1GiB", "1.5 gib", "0MiB", "1e3MB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SpecError, match=r"memory must be a size such as 1.5GiB"):
        Cluster(memory=text)


def test_a_gpu_maps_what_it_likes():
    with pytest.raises(SpecError, match="device=cuda"):
        Cluster(memory="1GiB", device="cuda")


def test_a_job_keeps_it():
    job = Job(target="x.py", cluster=Cluster(workers=2, memory="1.5GiB"))
    assert Job.from_json(job.to_json()) == job
