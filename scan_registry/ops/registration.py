"""How operators are registered with torch: once per process, however often the package is imported.

A reloader purges ``sys.modules`` and imports the package again, but torch keeps what was registered.
So what torch calls looks the package's function up by name, in whichever copy is imported by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

NAMESPACE = "scan_registry"
#: Keys of what computes: no frame for torch.compile to look into while a compiled function runs.
_DEVICES = ("CPU", "CUDA")


def register(schema: str, module: str, functions: Mapping[str, str]) -> Any:
    """The operator of ``schema``, with a function of ``module`` for each dispatch key.

    ``functions`` maps to names: "device" (CPU and CUDA), "Autograd", "Meta"; "FuncTorchBatched" to a rule
    for ``torch.vmap`` as ``torch.library.register_vmap`` takes it, or "FuncTorchBatchedDecomposition" to a
    function in operators that torch maps itself.

    Raises:
        ImportError: this process registered the operator with another schema, by another version of
            the package.
    """
    name = schema.partition("(")[0]
    there = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if there is not None:
        if there.default._schema != torch._C.parse_schema(f"{NAMESPACE}::{schema}"):
            raise ImportError(
                f"another version of {NAMESPACE} has registered the operator {name} in this "
                "process; start a new process to change versions"
            )
        return there.default
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for key, function in functions.items():
        if key == "device":
            for device in _DEVICES:
                library.impl(name, _disable_dynamo(_named(library, module, function)), device)
        elif key == "FuncTorchBatched":
            rule = _mapping(name, _named(library, module, function))
            library.impl(name, rule, key)
        else:
            # "Meta" rather than torch.library.register_fake, which takes longer than most of a first call to
            # find out where it is called from.
            library.impl(name, _named(library, module, function), key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _named(library: Any, module: str, name: str) -> Callable[..., Any]:
    """Calls the function of that name. Torch keeps it, and with it ``library``, whose end would be the
    operator's."""

    def call(*args: Any) -> Any:
        return getattr(import_module(module), name)(*args)

    call.library = library  # type: ignore[attr-defined]
    return call


def _mapping(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.library.register_vmap registers, but for its imports, which take longer than a first call."""

    def call(*args: Any) -> Any:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, rule, operator, *args)

    return call


@contextmanager
def below_autograd() -> Iterator[None]:
    """In ``forward`` of a function that is recorded: what is dispatched goes to the next level of
    ``torch.func``, where derivatives are on as they were, or to the kernels."""
    if not torch._C._are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd():
            yield
        return
    # torch has switched both modes off for ``forward``, and would for the levels around this one.
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def record(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` in a kernel of the key Autograd.

    There, ``torch.func`` has each of its levels recorded by itself, as it does with torch's own
    operators. Elsewhere that would be wrong, so ``apply`` refuses a function in this style.
    """
    apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    if not torch._C._are_functorch_transforms_active():
        return apply(*args)
    functions: Any = import_module("torch._functorch.autograd_function")
    with functions.enable_single_level_autograd_function():
        return apply(*args)
