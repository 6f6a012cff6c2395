from typing import Literal, TypeAlias

_Addresses: TypeAlias = tuple[int | None, ...]
_Integers: TypeAlias = tuple[int, ...]

def forward(
    dtype: str, gates_dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def backward(
    dtype: str, gates_dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def reduction(
    dtype: str,
    gates_dtype: str,
    pointers: _Addresses,
    scalars: _Integers,
    threads: int,
    layout: Literal["time_last", "channel_last"],
    /,
) -> None: ...
def selective_scan_forward(
    dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def selective_scan_backward(
    dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def causal_conv1d_forward(
    dtype: str, weight_dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def causal_conv1d_backward(
    dtype: str, weight_dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def causal_conv1d_update(
    dtype: str, weight_dtype: str, pointers: _Addresses, scalars: _Integers, threads: int, /
) -> None: ...
def rnn_forward(
    cell: str, pointers: _Addresses, scalars: _Integers, clip: float, threads: int, /
) -> None: ...
def rnn_backward(
    cell: str, pointers: _Addresses, scalars: _Integers, clip: float, threads: int, /
) -> None: ...
def instructions(name: str = ..., /) -> str: ...
