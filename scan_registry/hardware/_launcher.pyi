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
    """What a call on the fast path does on a GPU: allocate a result, and launch.

    ``places`` are those of the tensors of the call, and of the result, among the launch's pointers.
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
    ) -> FastLaunch: ...

#: What is done with gates and tokens.
FastPlan = FastLaunch | Callable[[Any, Any], Any]

class FastPath:
    """Calls on two plain tensors, without options. Without ``exchange`` no call takes this path.

    types     of plain tensors
    tensor    the C type that they all are of, torch._C.TensorBase
    exchange  the tensor type's __dlpack_c_exchange_api__, or None
    observers functions of nothing, whose results are true while something sees or changes what is dispatched
    backends  what there is to ask for
    choice    a function of nothing that plans depend on, beside the arguments
    plan      makes a plan from the arguments of the first call of its kind
    tracking  whether gradients are recorded
    record    tells autograd, where a tensor requires gradients: of gates, tokens, and states with what
              was asked for, which is ``dim``, ``backend`` and choice; returns the states
    """

    def __new__(
        cls,
        types: tuple[type, ...],
        tensor: type,
        exchange: object,
        observers: tuple[Callable[[], object], ...],
        backends: tuple[str, ...],
        choice: Callable[[], object],
        plan: Callable[[Any, Any, int, Any], FastPlan],
        tracking: Callable[[], bool],
        record: Callable[[Any, Any, tuple[Any, tuple[int, Any, Any]]], Any],
    ) -> FastPath: ...
    def run(self, gates: object, tokens: object, dim: int, backend: object, /) -> Any: ...

def bind(launch: int, memset: int, current: int, push: int, pop: int, /) -> None: ...

class TensorPath:
    """Calls on a number of plain tensors, of which some may be None, without derivatives. Without ``exchange`` no call
    takes this path.

    types, tensor, exchange, observers, choice, tracking: as for ``FastPath``
    plan     makes a plan from the flag and the tensors of the first call of its kind
    count    tensors of a call
    aligned  bits of those whose alignment a plan depends on
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
    ) -> TensorPath: ...
    def run(self, flag: bool, /, *tensors: Any) -> Any | None: ...
