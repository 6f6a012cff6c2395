from collections.abc import Callable

def bind(
    types: tuple[type, ...],
    watchers: tuple[Callable[[], object], ...],
    is_neg: Callable[..., bool],
    exchange: object,
    /,
) -> None: ...
def signature(gates: object, tokens: object, /) -> tuple[bytes, int, int] | None: ...
