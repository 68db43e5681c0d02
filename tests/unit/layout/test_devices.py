"""Which devices a machine has, and why one is left out; with made-up properties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.layout.devices import GpuSeen, read_architectures, read_cpu, read_smi, usable

SMI = """\
0, NVIDIA H200, 9.0, 143771, 143200, Default
1, NVIDIA H200, 9.0, 143771, 512, Default
2, Tesla K80, 3.7, 11441, 11400, Default
3, NVIDIA H200, 9.0, 143771, 143200, Prohibited
4, NVIDIA H200, [Unknown Error], [GPU is lost], [GPU is lost], [Unknown Error]
No devices were found
"""
BUILT_FOR = read_architectures(["sm_75", "sm_90", "sm_120", "compute_120", "gfx942"])


def test_architectures_are_read() -> None:
    assert BUILT_FOR == [(7, 5), (9, 0), (12, 0)]


def test_gpus_that_cannot_be_used_are_left_out_with_the_reason() -> None:
    found, lines = usable(read_smi(SMI), BUILT_FOR)
    assert [gpu.index for gpu in found] == [0]
    for line, (index, reason) in zip(
        lines,
        [(1, "512 MiB of memory free"), (2, "3.7 is older than 7.5"), (3, "Prohibited"), (4, "an error")],
        strict=True,
    ):
        assert line.startswith(f"GPU {index} (") and reason in line


def test_what_is_not_known_is_not_held_against_a_gpu() -> None:
    seen = GpuSeen(index=0, name="a GPU", total_bytes=8 << 30)
    assert not seen.why_left_out(BUILT_FOR) and not seen.why_left_out()
    assert "0 MiB" in replace(seen, free_bytes=0).why_left_out()


CPUS = [
    ("model name : AMD EPYC\nflags : fpu avx2 fma\n", ("avx2",), ()),
    (
        "model name\t: Intel Xeon\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16\n",
        ("avx512f", "avx2"),
        ("amx_bf16", "avx512_bf16"),
    ),
    ("CPU part : 0xd40\nFeatures : fp asimd bf16 sve\n", ("sve", "asimd"), ("bf16",)),
    ("", (), ()),
]


@pytest.mark.parametrize(("text", "vectors", "halves"), CPUS)
def test_processors_are_read(text: str, vectors: tuple[str, ...], halves: tuple[str, ...]) -> None:
    seen = read_cpu(text, {"index0/size": "32K", "index3/size": "32768K", "index4/size": "odd"}, cores=2)
    assert (seen.vectors, seen.halves, seen.cache_bytes) == (vectors, halves, 32 << 20)
    assert ("no instructions for bf16" in str(seen)) == (not halves)
