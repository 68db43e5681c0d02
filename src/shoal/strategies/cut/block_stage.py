"""A stage of a model that is cut between its blocks: the model's own forward, with stand-ins for the others."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from shoal.errors import TaskError
from shoal.strategies.cut.graph import copied
from shoal.strategies.cut.hollow import is_hollow, without_others
from shoal.strategies.cut.tracing import call_given


class StageLeft(Exception):
    """The last block of a stage is done, and what follows is another's."""

    def __init__(self, result: Any) -> None:
        self.result = result


class BlockStage(nn.Module):
    """Runs the whole forward of the model, of which it has some blocks and what is called around them.

    Blocks before these hand over what came from the stage before; what else of the model is called before them is
    hollow, and nobody uses what it makes. After the last of its blocks the pass is left.
    """

    def __init__(
        self,
        whole: nn.Module,
        *,
        parts: Mapping[str, nn.Module],
        present: Collection[str],
        blocks: Sequence[str],
        own: range,
    ) -> None:
        """`parts`: all that has parameters, by name; `present`: those that are here; `own`: the blocks that are,
        by number, where one more than there are stands for all that follows the last."""
        super().__init__()
        made = without_others(whole, set(parts.values()), {parts[name] for name in present})
        # One tree of layers, with the names of the whole: who replaces a layer here replaces it in what runs.
        self._modules, self._parameters, self._buffers = made._modules, made._parameters, made._buffers
        self._non_persistent_buffers_set = made._non_persistent_buffers_set
        self._made = (made,)  # not as a module, which would be one more
        self._signature = inspect.signature(whole.forward)
        self._last = blocks[own.stop - 1] if own.stop <= len(blocks) else None
        self._enters = own.start > 0
        self._carried: Any = None
        self._was_entered = False
        for number, name in enumerate(blocks):
            if number not in own:
                stand_in = self._refuse if number >= own.stop else self._pass_over
                vars(made.get_submodule(name))["forward"] = self._enter if number == own.start - 1 else stand_in

    def forward(self, carried: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """From what the last block before these has made, and what the model is given."""
        (made,) = self._made
        made.training = self.training
        self._was_entered = False
        self._carried = carried[0] if self._enters else None
        try:
            with self._left_at_the_end(made):
                result = call_given(made, self._signature, given)
        except StageLeft as left:
            result = (left.result,)
        else:
            if self._last is not None:
                self._refuse()
        finally:
            self._carried = None
        if self._enters and not self._was_entered:
            self._refuse()
        return result

    def copies_of(self, whole: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Modules that are here as copies, each with that of the whole: who sets the mode of the whole alone must
        set theirs."""
        named = ((inner, whole.get_submodule(name)) for name, inner in self.named_modules())
        return [(inner, other) for inner, other in named if inner is not other and not is_hollow(inner)]

    def _left_at_the_end(self, made: nn.Module) -> AbstractContextManager[Any]:
        """For one pass: so this comes after whatever others have hooked to the block."""
        if self._last is None:
            return nullcontext()
        return made.get_submodule(self._last).register_forward_hook(_leave)

    def _pass_over(self, *args: Any, **kwargs: Any) -> Any:
        """In place of blocks before these: whatever looks like a block's result."""
        return self._carried

    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the last of them. What follows may change it in place, but not what autograd began with."""
        self._was_entered = True
        return copied(self._carried)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """In place of a block behind these."""
        (made,) = self._made
        raise TaskError(
            f"Task: {type(made).__name__} was cut between its blocks, but has left out one beside the cut; let it "
            "call all of them every time, or use data, sharded or ps."
        )


def _leave(block: nn.Module, args: Any, output: Any) -> None:
    raise StageLeft(output)
