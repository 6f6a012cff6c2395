"""How operators are registered with torch: once per process, however often the package is imported.

A reloader purges ``sys.modules`` and imports the package again, but torch keeps what was registered.
So what torch calls looks the package's function up by name, in whichever copy is imported by then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from scan_registry.base.package import NAME

#: That of torch.ops. Each copy of the package has its own, as it has its own functions.
NAMESPACE = NAME
#: Keys of what computes: no frame for torch.compile to look into while a compiled function runs.
_DEVICES = ("CPU", "CUDA")


def register(schema: str, module: str, functions: Mapping[str, str]) -> Any:
    """The operator of ``schema``, with a function of ``module`` for each dispatch key.

    ``functions`` maps to names, which may have dots: "device" (CPU and CUDA), "Autograd", "Meta"; "FuncTorchBatched" to a rule
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
        elif key in ("Autograd", "Meta"):
            # "Meta" rather than torch.library.register_fake, which is slow: it inspects the call stack.
            library.impl(name, _exported(name, key, _named(library, module, function)), key)
        elif key == "FuncTorchBatched":
            library.impl(name, _mapping(name, _named(library, module, function)), key)
        else:
            library.impl(name, _named(library, module, function), key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _named(library: Any, module: str, name: str) -> Callable[..., Any]:
    """Calls the function of that name. Torch keeps it, and with it ``library``, whose end would be the
    operator's."""

    def call(*args: Any) -> Any:
        return attrgetter(name)(import_module(module))(*args)

    call.library = library  # type: ignore[attr-defined]
    return call


def not_in_onnx(what: str) -> RuntimeError:
    """The error that says what to export in place of something that ONNX has not."""
    return RuntimeError(
        f"torch.onnx cannot export {what}: load the module's state dict into the module of torch.nn with the same name, or "
        "where there is none into the public implementation that has this state dict, and export that"
    )


def _exported(name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What sees an operator while torch traces or exports a program: here torch.onnx is told that ONNX has no such operator.

    The older exporter calls "Autograd" and looks up translations later. A user's translation for an opset above 1 then takes
    precedence. The newer exporter also calls "Meta", and already has its translations.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise not_in_onnx(f"the operator {NAMESPACE}::{name}")

    def call(*args: Any) -> Any:
        onnx = sys.modules.get("torch.onnx")
        if onnx is not None and onnx.is_in_onnx_export():
            if key == "Autograd":
                onnx.register_custom_op_symbolic(f"{NAMESPACE}::{name}", refuse, 1)
            elif not _is_translated(name):
                refuse()
        return function(*args)

    return call


def _is_translated(name: str) -> bool:
    """Whether the call of torch.onnx.export that is running was given a translation of the operator."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        table = frame.f_locals.get("custom_translation_table")
        if isinstance(table, Mapping) and (operator in table or operator.default in table):
            return True
        frame = frame.f_back
    return False


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
