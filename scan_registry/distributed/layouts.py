"""Names the dimensions of an operator's tensors by letters, as in ``torch.einsum``.

A tensor has one letter for each of its dimensions. Dimensions with the same letter are sharded together. A dot stands for a
dimension that cannot be sharded. Time, "t", is sharded by ``time_shards`` alone. If another letter is sharded, each rank
computes its shards without communication. An argument without that letter is replicated. A result without that letter is a sum
over ranks (``Partial``), such as the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """The letters of one call.

    inputs   letters of each tensor among the arguments, in order; None for a tensor that is not given
    outputs  letters of each result; None for an empty tensor in place of a result that is not wanted
    letters  the letters that can be sharded. A dimension with the upper-case letter is sharded together with the letter:
             groups of channels, for example
    whole    for some letters a number that the number of shards has to divide
    """

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    letters: str
    whole: Mapping[str, int] = {}


#: The letter of time, and letters for the other dimensions of linear scans.
TIME = "t"
_NAMES = "abcdefghijklmnopqrsuvwxyz"


def _optional(tensor: Any, letters: str) -> str | None:
    return None if tensor is None else letters


def _wanted(letters: Sequence[str], wanted: Sequence[bool]) -> tuple[str | None, ...]:
    return tuple(name if want else None for name, want in zip(letters, wanted, strict=True))


def names_of(rank: int, dim: int) -> str:
    """A letter for each dimension; dots besides time if there are more dimensions than letters."""
    names = _NAMES if rank <= len(_NAMES) else "." * rank
    return "".join(TIME if d == dim % rank else names[d] for d in range(rank))


def broadcast(shape: Sequence[Any], whole: Sequence[Any], letters: str) -> str:
    """The letters of a tensor that broadcasts to the shape ``whole``, whose letters are given."""
    missing = len(letters) - len(shape)
    return "".join(
        letters[missing + d] if size == whole[missing + d] else "." for d, size in enumerate(shape)
    )


def state_of(letters: str, cu_seqlens: Any) -> str:
    """The letters of a state. Its dimensions are those of the sequence without time, or with packed sequences in its place."""
    return letters.replace(TIME, "" if cu_seqlens is None else ".")


def _initial(initial_state: Any, shape: Sequence[Any], letters: str, cu_seqlens: Any) -> str | None:
    """The letters of an initial state, which may broadcast. ``shape`` and ``letters`` are those of the sequence."""
    if initial_state is None:
        return None
    count = () if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    place = letters.find(TIME)
    sizes = (*shape[:place], *count, *shape[place + 1 :])
    return broadcast(initial_state.shape, sizes, state_of(letters, cu_seqlens))


def only(letters: str) -> str:
    return letters.replace(".", "").replace(TIME, "")


def linear_scan(
    gates: Tensor, tokens: Tensor, initial_state: Any, cu_seqlens: Any, dim: int, reverse: bool,
    final: bool, backend: str,
) -> Layout:  # fmt: skip
    """The layout of the operator with these arguments. The functions below do the same for the other operators."""
    shape = torch.broadcast_shapes(gates.shape, tokens.shape)
    names = names_of(len(shape), dim)
    inputs = (
        broadcast(gates.shape, shape, names),
        broadcast(tokens.shape, shape, names),
        _initial(initial_state, shape, names, cu_seqlens),
        _optional(cu_seqlens, "."),
    )
    return Layout(inputs, (names, state_of(names, cu_seqlens) if final else None), only(names))


def linear_scan_backward(
    gates: Tensor, states: Any, states_grad: Tensor, initial_state: Any, last_grad: Any,
    cu_seqlens: Any, dim: int, reverse: bool, backend: str, wanted: Sequence[bool],
) -> Layout:  # fmt: skip
    names = names_of(states_grad.dim(), dim)
    state = state_of(names, cu_seqlens)
    of_gates = broadcast(gates.shape, states_grad.shape, names)
    inputs = (
        *(of_gates, _optional(states, names), names, _optional(initial_state, state)),
        *(_optional(last_grad, state), _optional(cu_seqlens, ".")),
    )
    return Layout(inputs, _wanted((of_gates, names, state), wanted), only(names))


def linear_scan_summary(
    gates: Tensor, tokens: Tensor, dim: int, reverse: bool, backend: str
) -> Layout:
    names = names_of(tokens.dim(), dim)
    state = state_of(names, None)
    return Layout((broadcast(gates.shape, tokens.shape, names), names), (state, state), only(names))


def _gated(
    inputs: Any, parameters: Any, reset: Any, initial_state: Any, cu_seqlens: Any, dim: int
) -> tuple[list[str | None], str, str]:
    names = "bct" if dim % 3 == 2 else "btc"
    letters = [
        *[names for _ in inputs],
        *["c" for _ in parameters],
        *(_optional(reset, "bt"), _initial(initial_state, inputs[0].shape, names, cu_seqlens)),
        _optional(cu_seqlens, "."),
    ]
    return letters, names, state_of(names, cu_seqlens)


def gated_scan(
    kind: str, inputs: Any, parameters: Any, reset: Any, initial_state: Any, cu_seqlens: Any,
    dim: int, reverse: bool, final: bool, backend: str,
) -> Layout:  # fmt: skip
    letters, names, state = _gated(inputs, parameters, reset, initial_state, cu_seqlens, dim)
    return Layout(tuple(letters), (names, state if final else None), "bc")


def gated_scan_backward(
    kind: str, inputs: Any, parameters: Any, reset: Any, initial_state: Any, cu_seqlens: Any,
    states: Tensor, states_grad: Any, last_grad: Any, dim: int, reverse: bool, backend: str,
    wanted: Sequence[bool],
) -> Layout:  # fmt: skip
    letters, names, state = _gated(inputs, parameters, reset, initial_state, cu_seqlens, dim)
    letters += [names, _optional(states_grad, names), _optional(last_grad, state)]
    results = [*[names for _ in inputs], *["c" for _ in parameters], state]
    there = [
        want and t is not None
        for t, want in zip([*inputs, *parameters, initial_state], wanted, strict=True)
    ]
    return Layout(tuple(letters), _wanted(results, there), "bc")


def _projection(tensor: Tensor, pairs: bool, whole: dict[str, int]) -> str:
    """The letters of B or C of a selective scan. Groups are sharded together with channels, so that a group's channels
    stay on one rank; ``whole`` receives the number of groups. ``pairs``: time holds pairs of numbers, which a shard of odd
    length would split."""
    time = "." if pairs else TIME
    if tensor.dim() == 2:
        return "c."
    if tensor.dim() == 3:
        return f"b.{time}"
    groups = tensor.shape[1]
    if groups == 1:
        return f"b..{time}"
    whole["c"] = gcd(groups, whole.get("c", groups))
    return f"bC.{time}"


def _selective(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, z: Any, delta_bias: Any,
    initial_state: Any, cu_seqlens: Any,
) -> tuple[list[str], str, dict[str, int]]:  # fmt: skip
    """The letters of all arguments that have a gradient, those of a state, and ``Layout.whole``."""
    state = "bc." if cu_seqlens is None else "b.c."
    whole: dict[str, int] = {}
    of_B, of_C = (_projection(x, A.is_complex(), whole) for x in (B, C))
    return ["bct", "bct", "c.", of_B, of_C, "c", "bct", "c", state], state, whole


def selective_scan(*args: Any) -> Layout:
    *tensors, _, _, _ = args
    letters, state, whole = _selective(*tensors)
    inputs = [_optional(t, names) for t, names in zip(tensors, [*letters, "."], strict=True)]
    return Layout(tuple(inputs), ("bct", state, _CHECKPOINTS), "bc", whole)


#: The letters of the states that forward keeps for backward: (batch, intervals, channels, states), or an empty tensor.
_CHECKPOINTS = "b.c."


def selective_scan_backward(*args: Any) -> Layout:
    tensors, others = args[:10], args[10:]
    checkpoints, _, last_grad, _, _, wanted = others
    letters, state, whole = _selective(*tensors)
    kept = _CHECKPOINTS if checkpoints.dim() == 4 else "."
    inputs = [_optional(t, names) for t, names in zip(tensors, [*letters, "."], strict=True)]
    inputs += [kept, "bct", _optional(last_grad, state)]
    there = [want and t is not None for t, want in zip(tensors[:9], wanted, strict=True)]
    return Layout(tuple(inputs), _wanted(letters, there), "bc", whole)


def _convolution(
    x: Tensor, weight: Tensor, bias: Any, initial_state: Any, seq_idx: Any, cu_seqlens: Any
) -> tuple[list[str | None], str, str]:
    state = "bc." if cu_seqlens is None else ".c."
    letters = [
        *("bct", "c.", _optional(bias, "c"), _optional(initial_state, state)),
        *(_optional(seq_idx, "bt"), _optional(cu_seqlens, ".")),
    ]
    return letters, state, "bc" if cu_seqlens is None else "c"


def causal_conv1d(*args: Any) -> Layout:
    *tensors, _, final, _ = args
    inputs, state, letters = _convolution(*tensors)
    return Layout(tuple(inputs), ("bct", state if final else None), letters)


def causal_conv1d_backward(*args: Any) -> Layout:
    tensors, (_, last_grad, _, _, wanted) = args[:6], args[6:]
    inputs, state, letters = _convolution(*tensors)
    inputs += ["bct", _optional(last_grad, state)]
    return Layout(tuple(inputs), _wanted(("bct", "c.", "c", state), wanted), letters)


#: The layout functions by the operators' names.
LAYOUTS: dict[str, Callable[..., Layout]] = {
    function.__name__: function
    for function in (
        linear_scan,
        linear_scan_backward,
        linear_scan_summary,
        gated_scan,
        gated_scan_backward,
        selective_scan,
        selective_scan_backward,
        causal_conv1d,
        causal_conv1d_backward,
    )
}
