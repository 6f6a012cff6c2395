"""The opening of a call: how ranks compare a call's arguments before they exchange data.

A call of this package is collective: every rank of the group makes it, with its own part. If one rank raised an error alone,
the others would wait for its data. Ranks with different shapes would wait for each other, or read past the data that was sent.
So every call *opens* with one all-gather, the *opening*. It has the same number of bytes on every rank, whatever the call is:

    a header    digest of what has to be equal | failed? | number of the call | local numbers | what has to be equal, in words
    data        the call's own row, where it is known to fit

**No rank skips an opening, whatever it has cached.** The opening also carries the data of calls that were agreed on before. A
``Session`` remembers the size of the opening (its *capacity*), and the calls that were agreed on. Both change only after all
ranks have read all headers and found them equal, so they change on all ranks in the same call. If a rank makes a call of a new
kind, the other ranks see its header in the opening of their own call. When the headers are read depends on the backend:

- If headers are exchanged in CPU memory, as with gloo, each rank reads all of them. A failure or a disagreement is an error on
  all ranks in the same call, and the next call can succeed.
- With NCCL alone, reading headers would wait for the GPU. A rank reads them in a call that is new to it. In a call that was
  agreed on before, it compares them on the GPU, forward and backward. If they differ, what the call takes from the gathered
  rows becomes NaN, and the first later call or backward pass that finds the comparison finished raises the error. No rank
  waits for missing data, as the opening is all that such a call exchanges.
- The first call of a kind, and calls with packed sequences, always read the headers first. So do calls that have a further
  collective after the opening.

Ranks that make calls in different orders are detected in the same way, as the digest contains the operator. If a rank has
stopped, or makes no call at all, the others' call ends by the group's timeout.

What a rank sends with every call of a kind, the header above all, stays in memory of the group's device from call to call
(``Opening``). A kernel writes the call's row behind the header in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scan_registry.distributed.group import Members, Session, all_gather, gather, is_capturing
from scan_registry.distributed.headers import HEADER, LOCAL, WORDS, Terms, encoded, read_headers
from scan_registry.ops.call import PLAIN_TYPES
from scan_registry.ops.sharded import is_dtensor

__all__ = [
    "Message",
    "Opened",
    "Opening",
    "agree",
    "check_local",
    "check_unread",
    "opening_of",
    "refusals",
    "refused",
]

#: The largest capacity of an opening, in bytes.
_MOST = 1 << 20
#: The most openings that a group keeps.
_KEPT = 64
#: While the CPU waits for a GPU to compare headers, it keeps gathered rows of at most so many bytes per rank; of larger ones,
#: only the headers.
_KEPT_WHOLE = 1 << 14
#: The most messages of an opening: of several streams, or of a capacity that has grown.
_STREAMS = 3
_COMPARED = 3  # words of a header that have to be equal: digest, failed, number
_WORD = 8
_NUMBER = 2  # the word that is the number of the call

_NOT_RECORDED = (
    "a CUDA graph cannot record this call, in which the CPU compares the arguments of all ranks: make the same call twice "
    "before, and if no tensor requires gradients, record it under torch.no_grad()"
)


def _reading_waits(place: torch.device) -> bool:
    """Whether reading headers that were exchanged on this device would make the CPU wait for the device."""
    return place.type != "cpu"


# --- What a rank sends, and what it gets ------------------------------------------------------


class Message:
    """What this rank sends in an opening: a header, and a row behind it.

    memory   64-bit words, as many as the opening's capacity holds
    nan      NaN in the dtype of the row, where the row is
    row      memory for the call's row, which the call fills in before it sends; None for a call without a row
    inline   whether ``row`` is a part of ``memory``. If not, it is exchanged after the opening
    """

    __slots__ = ("compared", "inline", "memory", "nan", "number", "row", "sent")

    def __init__(
        self, capacity: int, place: torch.device, count: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.memory = torch.empty(capacity // _WORD, dtype=torch.int64, device=place)
        self.number = self.memory[_NUMBER]
        self.compared = self.memory[:_COMPARED]
        self.sent = 0  # the number that ``memory`` has now
        self.row = self.nan = None
        self.inline = False
        if count:
            self.nan = torch.full((), torch.nan, dtype=dtype, device=device)
            size = count * dtype.itemsize
            self.inline = device.type == place.type and HEADER + size <= capacity
            if self.inline:
                self.row = self.memory.view(torch.uint8)[HEADER : HEADER + size].view(dtype)
            else:
                self.row = torch.empty(count, dtype=dtype, device=device)

    def write(self, header: bytes) -> Message:
        words = torch.frombuffer(bytearray(header), dtype=torch.int64)
        # A blocking copy would make the CPU wait for the GPU.
        self.memory[: HEADER // _WORD].copy_(words, non_blocking=True)
        return self

    def copy_header(self, other: Message) -> None:
        """Take the header of a message of the same terms, which was written before. Its number may be changing on another
        stream."""
        self.memory[: HEADER // _WORD].copy_(other.memory[: HEADER // _WORD])
        self.sent = -1


class Opened(NamedTuple):
    """The result of an opening.

    local  the local numbers of each rank; None where the headers were not read
    rows   (ranks, elements); None for a call without rows
    equal  whether the headers are equal, on the GPU; None where they were read
    nan    NaN on the same device, in the rows' dtype
    headers  the words of all ranks' headers, and more
    summary  what this rank computed for its row and needs again after the exchange; None for nothing
    """

    local: tuple[tuple[int, ...], ...] | None
    rows: Tensor | None = None
    equal: Tensor | None = None
    nan: Tensor | None = None
    headers: Tensor | None = None
    summary: Any = None

    @property
    def numbers(self) -> Tensor:
        """The local numbers of each rank, (ranks, ``LOCAL``), where they were exchanged; no rank has to have read them."""
        assert self.headers is not None
        return self.headers[:, WORDS - LOCAL : WORDS]

    def guarded(self, x: Tensor) -> Tensor:
        """``x``, or NaN in its place if the GPU found that the ranks disagree."""
        if self.equal is None or self.nan is None:
            return x
        return torch.where(self.equal, x, self.nan)


class Opening:
    """How this rank opens calls with the same terms and a row of ``count`` elements; 0 for no row.

    The messages stay in memory, one for each stream: kernels of one stream write a message only after the exchange of the
    call before it. ``terms.number`` is left out, and may differ from call to call.
    """

    def __init__(
        self,
        members: Members,
        terms: Terms,
        device: torch.device | None,
        count: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.members, self.terms, self.kind, self.device = members, terms, terms.kind, device
        self.count, self.dtype = count, dtype
        self.place = _opening_device(members, device)
        #: The device whose streams use messages: a GPU if headers or rows are there. Rows may be on a GPU while headers are in
        #: CPU memory.
        self.on = device if device is not None and self.place.type != "cuda" else self.place
        self._messages: dict[tuple[int, int], Message] = {}

    def _message(self) -> Message:
        """The message to send next, whose row the call fills in."""
        capacity = self.members.session.capacity
        key = capacity, _stream(self.on)
        # Memory of a CUDA graph belongs to that graph, and it shares none with calls that are not recorded.
        capturing = is_capturing(self.on)
        message = None if capturing else self._messages.get(key)
        if message is None:
            # No tensors of inference mode, which other calls could not write to.
            with torch.inference_mode(False):
                message = Message(capacity, self.place, self.count, self.dtype, self.device)
            other = next(iter(self._messages.values()), None)
            if capturing and other is not None:
                # A graph cannot copy from the CPU's usual memory. Whenever it runs, it reads the other message.
                message.copy_header(other)
                if other not in self.members.session.captured:
                    self.members.session.captured.append(other)
            else:  # another stream may not have written the other message yet
                message.write(encoded(self.terms._replace(number=0)))
            if not capturing:
                if len(self._messages) >= _STREAMS:
                    self._messages.clear()
                self._messages[key] = message
        return message

    def exchange(
        self,
        make: Callable[[Tensor], None] | None = None,
        number: int = 0,
        *,
        error: Exception | None = None,
        read: bool = True,
    ) -> Opened:
        """Exchange the messages of all ranks. Errors are as for ``agree``.

        make   writes this rank's row, where the call has one. Whatever of this rank's work may fail before the exchange has
               its place here: an error there, such as one of memory, becomes an error on all ranks. Outside, this rank would
               leave the others waiting
        error  why this rank cannot make the call; the other ranks raise an error that names it
        read   false if the call may go on before this rank has read the headers
        """
        message = None
        if error is None:
            try:
                message = self._message()
                if make is not None and message.row is not None:
                    make(message.row)
            except Exception as failure:
                error = failure
        return self._exchange(message, error, number, read)

    def _exchange(
        self, message: Message | None, error: Exception | None, number: int, read: bool
    ) -> Opened:
        members, place, state = self.members, self.place, self.members.session
        # While a CUDA graph is recorded, asking for an event would end the recording.
        capturing = is_capturing(place)
        if state.unread and not capturing:
            # The other ranks may not know of the error yet: this rank's header in the opening tells them.
            error = _earlier_error(members) or error
        reads = read or error is not None or self._has_to_read(message)
        if capturing and reads:
            raise error or RuntimeError(_NOT_RECORDED)
        state.calls += 1
        if error is not None:
            message = Message(state.capacity, place, 0, self.dtype, place).write(encoded(error))
        assert message is not None
        if error is None and message.sent != number:
            message.number.fill_(number)
            message.sent = number
        words = torch.empty(members.size, message.memory.shape[0], dtype=torch.int64, device=place)
        gather(words.view(-1), message.memory, members.group)
        local = equal = None
        if reads:
            local = self._read(words, error)
        else:
            equal = _compared(state, words, message, self.terms.operator)
        if not self.count:
            return Opened(local, None, equal, headers=words)
        return Opened(local, self._rows(words, message), equal, message.nan, words)

    def _has_to_read(self, message: Message | None) -> bool:
        """Whether the headers have to be read before the call goes on, or can be read without waiting."""
        state = self.members.session
        fits = message is not None and (message.inline or not self.count)
        known = fits and self.kind in state.agreed
        return not known or state.careful or not _reading_waits(self.place)

    def _read(self, words: Tensor, error: Exception | None) -> tuple[tuple[int, ...], ...]:
        """The local numbers of all ranks, or the error of this call."""
        state = self.members.session
        # Read headers until a call succeeds: ranks may learn of an error in different calls.
        state.careful = True
        # If this raises, the comparisons of earlier calls have no more to say.
        earlier_calls = list(state.unread)
        state.unread.clear()
        local = read_headers(words, self.terms if error is None else error)
        state.unread.extend(earlier_calls)
        state.careful = False
        if self.kind not in state.agreed:
            state.remember(self.kind)
        return local

    def _rows(self, words: Tensor, message: Message) -> Tensor:
        """The rows of all ranks: behind the headers, or by an exchange of their own."""
        assert message.row is not None
        assert self.device is not None
        if message.inline:
            at = HEADER // self.dtype.itemsize
            return words.view(self.dtype)[:, at : at + self.count]
        state, size = self.members.session, HEADER + self.count * self.dtype.itemsize
        if self.device.type == self.place.type and state.capacity < size <= _MOST:
            state.capacity = 1 << (size - 1).bit_length()
        return all_gather(self.members, message.row)


def _stream(place: torch.device) -> int:
    if place.type != "cuda":
        return 0
    return int(torch._C._cuda_getCurrentRawStream(place.index))


def _opening_device(members: Members, device: torch.device | None) -> torch.device:
    """The device for headers. Its kind depends on the group alone, as a rank's tensors may be on a wrong device."""
    kinds = members.session.kinds
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    if device is not None and device.type in kinds:
        return device
    kind = sorted(kinds)[0]
    return torch.device(kind, torch.cuda.current_device() if kind == "cuda" else 0)


# --- Calls without a plan of their own --------------------------------------------------------


def agree(members: Members, terms: Terms | Exception, device: torch.device | None = None) -> Any:
    """Compare the terms of all ranks, and return the local numbers of each rank. Every rank of the group has to call this.

    ``terms`` is an exception if the rank's own arguments are bad. This rank then raises the exception, and the others a
    ``RuntimeError`` that names the rank and the exception. If terms differ, all ranks raise a ``ValueError`` whose message
    has the terms of each rank. ``device`` is the device of the rank's tensors.
    """
    error = terms if isinstance(terms, Exception) else None
    if members.size == 1:
        if error is not None:
            raise error
        assert not isinstance(terms, Exception)
        return (terms.local,)
    if isinstance(terms, Exception):
        terms = Terms("a call", ())
    return opening_of(members, terms, device).exchange(number=terms.number, error=error).local


@contextmanager
def refusals(members: Members, tensors: Iterable[Any]) -> Iterator[None]:
    """If a rank refuses its arguments in this context, the other ranks learn of it. The first of ``tensors`` has the device."""
    try:
        yield
    except Exception as error:
        agree(members, error, next((t.device for t in tensors if isinstance(t, Tensor)), None))
        raise


def opening_of(
    members: Members, terms: Terms, device: torch.device | None, count: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Opening:  # fmt: skip
    """The group's opening for these terms, and for rows of ``count`` elements."""
    memory = members.session.openings
    key = terms._replace(number=0), device, count, dtype
    opening: Opening | None = memory.get(key)
    if opening is None:
        if len(memory) >= _KEPT:
            memory.clear()
        opening = memory[key] = Opening(members, terms, device, count, dtype)
    return opening


# --- Headers that are compared on a GPU -------------------------------------------------------


class _Flag:
    """A bool that arrives in the CPU's memory from a GPU."""

    __slots__ = ("_event", "_memory", "_value")

    def __init__(self, place: torch.device) -> None:
        on_gpu = place.type == "cuda"
        with torch.inference_mode(False):
            self._memory = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=on_gpu)
        self._value = ctypes.c_bool.from_address(self._memory.data_ptr())
        self._event = torch.cuda.Event() if on_gpu else None

    def come(self, value: Tensor) -> None:
        self._memory.copy_(value, non_blocking=True)
        if self._event is not None:  # the current device may be another one
            self._event.record(torch.cuda.current_stream(value.device))

    def has_come(self) -> bool:
        return self._event is None or self._event.query()

    @property
    def value(self) -> bool:
        return self._value.value


class Unread(NamedTuple):
    """Headers that a GPU compares. The flag says whether they are equal, once it has come."""

    flag: _Flag
    headers: Tensor
    operator: str


def _compared(state: Session, words: Tensor, message: Message, operator: str) -> Tensor:
    """Whether the headers are equal, as a tensor on the GPU. ``check_unread`` raises the error in a later call."""
    equal = (words[:, :_COMPARED] == message.compared).all()
    if is_capturing(words.device):  # the CPU learns nothing when a CUDA graph runs
        return equal
    flag = state.flags.pop() if state.flags else _Flag(words.device)
    flag.come(equal)
    # The CPU may learn the result many calls later, and large rows would take memory until then.
    headers = (
        words if words.shape[1] * _WORD <= _KEPT_WHOLE else words[:, : HEADER // _WORD].clone()
    )
    state.unread.append(Unread(flag, headers, operator))
    return equal


def _earlier_error(members: Members) -> Exception | None:
    """The error that ``check_unread`` raises, if any."""
    try:
        check_unread(members)
    except (RuntimeError, ValueError) as error:
        return error
    return None


def check_unread(members: Members) -> None:
    """Raise the error of an earlier call whose headers a GPU compared. Only comparisons that have finished are checked."""
    state = members.session
    while state.unread and state.unread[0].flag.has_come():
        flag, headers, operator = state.unread.popleft()
        state.flags.append(flag)
        if not flag.value:
            state.unread.clear()  # one error is enough for all calls until now
            read_headers(headers, Terms(operator, ()))


# --- Tensors that are refused -----------------------------------------------------------------


def check_local(members: Members, function: str, **tensors: Any) -> None:
    """Raise a ``TypeError`` if a tensor is a DTensor. The other ranks learn of it, as of any argument that is refused."""
    for name, tensor in tensors.items():
        if tensor is not None and type(tensor) not in PLAIN_TYPES and is_dtensor(tensor):
            agree(members, refused(function, name, tensor), tensor.device)


def refused(function: str, name: str, tensor: Any) -> TypeError:
    """The error of this function of ``scan_registry.distributed``."""
    return TypeError(
        f"{name} is a DTensor with placements {tensor.placements}; distributed.{function} takes local tensors, each "
        f"rank's own part: pass {name}.to_local(). The operators of scan_registry itself take DTensors"
    )
