"""What held a GPU's memory when it ran out, and what would help. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.layout.placement_table import binary_size


@dataclass(frozen=True, kw_only=True)
class GpuHeld:
    """Bytes of a GPU when more were asked for than it has."""

    name: str
    total: int
    free: int
    peak: int
    """The most that this process has used at a time."""
    reserved: int
    """What it has taken from the driver, used or not."""
    parameters: int
    gradients: int
    state: int
    """What the optimizer keeps."""

    @property
    def rest(self) -> int:
        """What none of these is: activations, mostly."""
        return max(0, self.peak - self.parameters - self.gradients - self.state)

    @property
    def of_others(self) -> int:
        """What other processes have."""
        return max(0, self.total - self.free - self.reserved)


def told_of(held: GpuHeld, *, asked: str, remedies: GpuRemedies) -> str:
    """One sentence: what was asked for, who had the memory, and what to do. `asked`: how much, as torch says."""
    parts = [
        f"parameters {binary_size(held.parameters)}",
        f"gradients {binary_size(held.gradients)}",
        f"what the optimizer keeps {binary_size(held.state)}",
        f"activations and all else {binary_size(held.rest)}",
    ]
    if held.of_others > held.total // 20:
        parts.append(f"other processes {binary_size(held.of_others)}")
    if (unused := held.reserved - held.peak) > held.total // 20:
        parts.append(f"taken but unusable, in pieces, {binary_size(unused)}")
    return (
        f"{held.name} has {binary_size(held.total)}, which was too little ({asked}): {', '.join(parts)}; "
        f"{', or '.join(remedies.best_for(held))}."
    )


@dataclass(frozen=True, kw_only=True)
class GpuRemedies:
    """What a job has not done yet to need less."""

    precision: bool = True
    """It could compute in bf16."""
    recompute: bool = True
    offload: bool = True
    """What its optimizer keeps could be in the host's memory."""
    several: bool = True
    """It has one worker, and could be cut."""

    def best_for(self, held: GpuHeld) -> list[str]:
        """The most useful first."""
        for_rest = ["accumulate=2 or more", *["precision=bf16"] * self.precision, *["recompute"] * self.recompute]
        for_state = [*["offload=optimizer"] * self.offload, *["sharded on several GPUs"] * self.several]
        own = held.state + held.parameters + held.gradients
        if held.of_others > max(held.rest, own, held.total // 20):
            return ["end what else is on this GPU", *for_rest[:1]]
        found = for_rest + for_state[:1] if held.rest >= held.state else for_state + for_rest[:1]
        return ["use " + found[0], *found[1:], "a smaller batch_size"]
