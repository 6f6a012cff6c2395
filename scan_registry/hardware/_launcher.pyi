from collections.abc import Callable
from typing import Any

class Launch:
    """A kernel launch with everything fixed but the stream and the pointers."""

    def __new__(
        cls,
        context: int,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        pointers: int,
        scalars: tuple[int, ...],
        hidden: int,
        workspace: int,
        workspace_bytes: int,
    ) -> Launch: ...
    def run(self, stream: int, /, *pointers: int | None) -> int: ...

class FastLaunch:
    """What a call on the fast path does on a GPU: it allocates its results, and launches a kernel.

    places     the place of each tensor of the call, and then of each result, among the launch's pointers
    empty      makes a tensor on the current device
    results    the arguments of ``empty`` for each result; one result is returned as it is, and several in a tuple
    workspace  likewise for the workspace; None if the launch has none
    refuse     raises the error of a status
    elsewhere  computes the results from the tensors in any context
    record     tells autograd, and returns what the call returns: called with a tuple of ``recording`` and a tuple of the
               results, and with the tensors; None if nothing is to be told
    """

    def __new__(
        cls,
        launch: Launch,
        places: tuple[int, ...],
        empty: Callable[..., Any],
        results: tuple[tuple[Any, ...], ...],
        workspace: tuple[Any, ...] | None,
        refuse: Callable[[int], object],
        elsewhere: Callable[..., Any],
        record: Callable[..., Any] | None = None,
        recording: object = None,
    ) -> FastLaunch: ...

#: Computes the results from the tensors; None for calls that do not take this path.
FastPlan = FastLaunch | Callable[..., Any] | None

class FastPath:
    """Calls on plain tensors. Without ``exchange`` no call takes this path.

    types     of plain tensors
    tensor    the C type that they all are of, torch._C.TensorBase
    exchange  the tensor type's __dlpack_c_exchange_api__, or None
    observers functions of nothing, whose results are true while something sees or changes what is dispatched
    choice    a function of nothing that plans depend on, beside the arguments
    plan      makes a plan from the first call of its kind: from whether autograd records it, its tensors and its options
    tracking  whether gradients are recorded, if a tensor requires them
    """

    def __new__(
        cls,
        types: tuple[type, ...],
        tensor: type,
        exchange: object,
        observers: tuple[Callable[[], object], ...],
        choice: Callable[[], object],
        plan: Callable[[bool, tuple[Any, ...], tuple[Any, ...]], FastPlan],
        tracking: Callable[[], bool],
    ) -> FastPath: ...
    def run(self, tensors: tuple[Any, ...], options: tuple[Any, ...], /) -> Any: ...

def bind(launch: int, memset: int, current: int, push: int, pop: int, /) -> None: ...

#: Of a text and an ordinal: a launch or function, places of pointers, arguments before and after them, alignment.
XlaResolver = Callable[
    [str, int],
    tuple[
        Launch | Callable[..., object],
        tuple[int | None, ...],
        tuple[Any, ...],
        tuple[Any, ...],
        int,
    ],
]

def xla_handlers(resolve: XlaResolver, /) -> tuple[int, int]: ...
