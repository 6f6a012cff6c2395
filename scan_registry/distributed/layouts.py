"""Names the dimensions of an operator's tensors by letters, as in ``torch.einsum``.

A tensor has one letter for each of its dimensions. Dimensions with the same letter are sharded together. A dot stands for a
dimension that cannot be sharded. Time, "t", is sharded by ``time_shards`` alone. If another letter is sharded, each rank
computes its shards without communication. An argument without that letter is replicated. A result without that letter is a sum
over ranks (``Partial``), such as the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


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


class Sharding(NamedTuple):
    """What the engine has to know to compute with DTensors: ``SHARDING`` of a family's module ``op.sharding``.

    operators  for each torch operator, by its name, a function of the operator's arguments that returns their layout
    required   how many of the first tensors of the public function cannot be None
    times      the time dimension of each tensor of the public function; None for a tensor without time
    layout     the layout of a call of the public function; None if the family's ``op.distributed`` does not support it

    ``times`` and ``layout`` take the tensors and the options as the public function passes them to ``call_sharded``. The function
    ``call`` of ``op.distributed`` takes the same, and the group.
    """

    operators: Mapping[str, Callable[..., Layout]]
    required: int
    times: Callable[[Sequence[Any], Sequence[Any]], list[int | None]]
    layout: Callable[[Sequence[Any], Sequence[Any]], Layout | None]


#: The letter of time, and letters for the other dimensions of linear scans.
TIME = "t"
_NAMES = "abcdefghijklmnopqrsuvwxyz"


def optional(tensor: Any, letters: str) -> str | None:
    return None if tensor is None else letters


def where_wanted(letters: Sequence[str], wanted: Sequence[bool]) -> tuple[str | None, ...]:
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


def initial_of(
    initial_state: Any, shape: Sequence[Any], letters: str, cu_seqlens: Any
) -> str | None:
    """The letters of an initial state, which may broadcast. ``shape`` and ``letters`` are those of the sequence."""
    if initial_state is None:
        return None
    count = () if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    place = letters.find(TIME)
    sizes = (*shape[:place], *count, *shape[place + 1 :])
    return broadcast(initial_state.shape, sizes, state_of(letters, cu_seqlens))


def only(letters: str) -> str:
    return letters.replace(".", "").replace(TIME, "")
