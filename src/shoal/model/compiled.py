"""Compiled models under the names of what was compiled."""

from __future__ import annotations

from torch import nn


def under_own_names(module: nn.Module) -> nn.Module:
    """The model without the wrappers of `torch.compile`, compiled as before.

    A wrapper puts `_orig_mod.` before every name, so what is saved would fit no model that is not compiled. What
    `module.compile()` does in its place has no wrapper, and works with the options that the wrapper keeps.
    """
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and _is_wrapper(child) and not _is_wrapper(parent):
                parent._modules[name] = _taken_out(child)
    return _taken_out(module) if _is_wrapper(module) else module


def _is_wrapper(module: nn.Module) -> bool:
    # Not by its class: that would import all that compiles, for seconds.
    return "_orig_mod" in module._modules and "dynamo_ctx" in vars(module)


def _taken_out(wrapper: nn.Module) -> nn.Module:
    inner = wrapper._modules["_orig_mod"]
    assert inner is not None
    if _is_wrapper(inner):  # compiled twice
        return _taken_out(inner)
    from torch._dynamo.external_utils import wrap_inline

    # In a frame of its own: those of torch's own modules are passed over by what compiles.
    inner._compiled_call_impl = vars(wrapper)["dynamo_ctx"](wrap_inline(inner._call_impl))
    return inner
