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
    """What a call on the fast path does on a GPU: it allocates one result or two, and launches a kernel.

    ``places`` has the place of each tensor of the call, and then of each result, among the launch's pointers. If ``last`` is
    given, a call returns two tensors.
    """

    def __new__(
        cls,
        launch: Launch,
        places: tuple[int, ...],
        empty: Callable[..., Any],
        states: tuple[Any, ...],
        workspace: tuple[Any, ...] | None,
        refuse: Callable[[int], object],
        elsewhere: Callable[..., Any],
        last: tuple[Any, ...] | None = None,
    ) -> FastLaunch: ...

#: Computes the results from gates, tokens, the initial state and ``cu_seqlens``; None for calls that do not take this path.
FastPlan = FastLaunch | Callable[..., Any] | None

class FastPath:
    """Scans of plain tensors. Without ``exchange`` no call takes this path.

    types     of plain tensors
    tensor    the C type that they all are of, torch._C.TensorBase
    exchange  the tensor type's __dlpack_c_exchange_api__, or None
    observers functions of nothing, whose results are true while something sees or changes what is dispatched
    backends  what there is to ask for
    choice    a function of nothing that plans depend on, beside the arguments
    plan      makes a plan from the arguments of the first call of its kind
    tracking  whether gradients are recorded
    record    called if a tensor requires gradients, to tell autograd; takes gates, tokens, the initial state,
              ``cu_seqlens``, and a tuple of the results and the request, which is ``dim``, ``reverse``, ``final``,
              ``backend`` and choice; returns the results
    """

    def __new__(
        cls,
        types: tuple[type, ...],
        tensor: type,
        exchange: object,
        observers: tuple[Callable[[], object], ...],
        backends: tuple[str, ...],
        choice: Callable[[], object],
        plan: Callable[[Any, Any, Any, Any, int, bool, bool, Any], FastPlan],
        tracking: Callable[[], bool],
        record: Callable[[Any, Any, Any, Any, tuple[Any, tuple[Any, ...]]], Any],
    ) -> FastPath: ...
    def run(
        self,
        gates: object,
        tokens: object,
        initial_state: object,
        cu_seqlens: object,
        dim: object,
        reverse: object,
        final: object,
        backend: object,
        /,
    ) -> Any: ...

def bind(launch: int, memset: int, current: int, push: int, pop: int, /) -> None: ...

class TensorPath:
    """Calls on a number of plain tensors, of which some may be None, without derivatives. Without ``exchange`` no call
    takes this path.

    types, tensor, exchange, observers, choice, tracking: as for ``FastPath``
    plan     makes a plan from the flag and the tensors of the first call of its kind
    count    tensors of a call
    aligned  bits of those whose alignment a plan depends on
    marks    bits of those that may be boolean
    """

    def __new__(
        cls,
        types: tuple[type, ...],
        tensor: type,
        exchange: object,
        observers: tuple[Callable[[], object], ...],
        choice: Callable[[], object],
        plan: Callable[..., FastLaunch | Callable[..., Any]],
        tracking: Callable[[], bool],
        count: int,
        aligned: int,
        marks: int = 0,
    ) -> TensorPath: ...
    def run(self, flag: bool, /, *tensors: Any) -> Any | None: ...
