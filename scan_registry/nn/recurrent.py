"""What the recurrent modules share: parameters as torch.nn has them, and layers over ``rnn``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import torch
import torch.fx
from torch import Tensor
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from scan_registry.kernels.rnn.problem import SIZES, Function, RnnBackend
from scan_registry.nn import checks, torch_cells
from scan_registry.ops.rnn import rnn
from scan_registry.ops.rnn_layer import fast_layer, on_gpu
from scan_registry.ops.rnn_layer_composed import Cell
from scan_registry.ops.rnn_layout import padded

States = list[Tensor]
#: The states before the first step and after the last one: a tensor, or a tuple of them.
StateT = TypeVar("StateT")


class _Weights(NamedTuple):
    """One layer's, of one direction, as ``rnn`` takes them."""

    inputs: Tensor
    recurrent: Tensor
    bias: Tensor | None


class Recurrent(torch.nn.RNNBase, Generic[StateT]):
    """What the modules share; parameters, their names and their initialisation are torch.nn's."""

    function: Function

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: Any,
        dtype: torch.dtype | None,
        backend: RnnBackend,
        num_heads: int = 1,
    ) -> None:
        checks.check_constructor(num_layers, dropout, dtype, backend)
        super().__init__(
            mode,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )
        checks.check_heads(num_heads, hidden_size)
        self.backend: RnnBackend = backend
        self.num_heads = num_heads

    def extra_repr(self) -> str:
        """As torch.nn's, and what else is not the default."""
        parts = [super().extra_repr()]
        if self.num_heads != 1:
            parts.append(f"num_heads={self.num_heads}")
        if self.backend != "auto":
            parts.append(f"backend={self.backend!r}")
        return ", ".join(parts)

    def flatten_parameters(self) -> None:
        """Does nothing: the kernels take parameters as they lie."""

    def __prepare_scriptable__(self) -> Any:
        """torch.jit.script asks for this first; what it would say by itself names our insides."""
        name = type(self).__name__
        raise RuntimeError(
            f"torch.jit.script cannot compile scan_registry.nn.{name}; use torch.compile, torch.export or "
            f"torch.jit.trace, or script torch.nn.{name if name != 'SLSTM' else 'LSTM'} with its weights"
        )

    def __del__(self) -> None:
        # At the interpreter's end there may be no modules any more.
        pool = sys.modules.get("scan_registry.ops.step_buffers") if sys.modules else None
        if pool is not None and "num_heads" in self.__dict__:  # set last
            heads, dim = self.num_heads * self._directions, self.hidden_size // self.num_heads
            pool.rnn_buffers.release(self.function, heads, padded(dim))

    if TYPE_CHECKING:  # calls go through torch.nn.Module's, which has no types

        @overload
        def __call__(self, input: Tensor, hx: StateT | None = None) -> tuple[Tensor, StateT]: ...

        @overload
        def __call__(
            self, input: PackedSequence, hx: StateT | None = None
        ) -> tuple[PackedSequence, StateT]: ...

        def __call__(self, input: Any, hx: Any = None) -> Any: ...

    @overload
    def forward(self, input: Tensor, hx: StateT | None = None) -> tuple[Tensor, StateT]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: StateT | None = None
    ) -> tuple[PackedSequence, StateT]: ...

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch.nn's: the last layer's h at every step, and the states after the last step.

        Args:
            input: (T, B, I), with ``batch_first`` (B, T, I), unbatched (T, I), or a ``PackedSequence``.
            hx: the states before the first step, (layers · directions, B, H) each, without B if
                unbatched; a tuple where there are several. Zeros if None.

        Returns:
            h, laid out as ``input`` and with directions · H features; and states as ``hx``. Strides are
            those of torch.nn's: time is outermost in memory, also with ``batch_first``.

        Raises:
            TypeError: ``input`` or ``hx`` is no tensor, no dense one, or no tuple of as many.
            ValueError: ``input`` has neither 2 nor 3 dimensions, or a dtype is not the parameters'.
            RuntimeError: another size is not as described, or devices differ. These are the types that
                torch.nn raises.
        """
        if isinstance(input, torch.fx.Proxy):
            return self._traced(input, hx)
        if isinstance(input, PackedSequence):
            checks.check_input(self, input.data, packed=True)
            sizes = input.batch_sizes
            if torch_cells.takes(self, input.data, (sizes.numel(), input.data.shape[0])):
                return self._packed(input, hx)
            x, lengths = pad_packed_sequence(input)
            states = checks.states_of(self, hx, x, x.shape[1])
            out, last = self._layers(x, states, lengths.to(x.device))
            return _packed_like(input, out, lengths), _as_given(last)
        checks.check_input(self, input)
        if input.dim() == 2:
            states = checks.states_of(self, hx, input, None)
            if states is not None:
                states = [state.unsqueeze(1) for state in states]
            out, last = self._layers(input.unsqueeze(1), states)
            return out.squeeze(1), _as_given([state.squeeze(1) for state in last])
        states = checks.states_of(self, hx, input, input.shape[0 if self.batch_first else 1])
        time = input.shape[1 if self.batch_first else 0]
        if torch_cells.takes(self, input, (time, input.shape[0] * input.shape[1])):
            out, last = torch_cells.run(self, input, states)
            return out, _as_given(last)
        x = input.transpose(0, 1) if self.batch_first else input
        out, last = self._layers(x, states)
        return out.transpose(0, 1) if self.batch_first else out, _as_given(last)

    def _packed(self, input: PackedSequence, hx: Any) -> Any:
        """A packed sequence as it lies, which no sequence is padded for."""
        data, sizes, order, back = input
        states = checks.states_of(self, hx, data, int(sizes[0]))
        if states is not None and order is not None:
            states = [state.index_select(1, order) for state in states]
        out, last = torch_cells.run(self, data, states, sizes)
        if back is not None:
            last = [state.index_select(1, back) for state in last]
        return PackedSequence(out, sizes, order, back), _as_given(last)

    def _traced(self, input: Any, hx: Any) -> Any:
        """A call of this module in the graph that torch.fx makes: as torch.nn's, it is traced no further."""
        path = input.tracer.path_of_module(self)
        if not path:
            raise TypeError(
                f"scan_registry.nn.{type(self).__name__} cannot be torch.fx's root, like torch.nn's; "
                "trace a module that holds it"
            )
        arguments = (input,) if hx is None else (input, hx)
        return input.tracer.create_proxy("call_module", path, arguments, {})

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _layers(
        self, x: Tensor, states: States | None, lengths: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """All layers, over x (T, B, I): h (T, B, directions · H), and the last states."""
        ends: list[States] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = dropout(x, self.dropout, self.training)
            rows = slice(layer * self._directions, (layer + 1) * self._directions)
            before = None if states is None else [state[rows] for state in states]
            found = self._fast_layer(layer, x, before) if lengths is None else None
            if found is not None and self.num_layers == 1:
                return found
            x, last = self._layer(layer, x, before, lengths) if found is None else found
            ends.append(last)
        return x, [torch.cat(state) for state in zip(*ends, strict=True)]

    def _fast_layer(
        self, layer: int, x: Tensor, before: States | None
    ) -> tuple[Tensor, States] | None:
        """One layer of one direction at the least cost; None if it has to be composed."""
        if self.bidirectional or not on_gpu(x):
            return None
        weights = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
        biases: tuple[Tensor | None, ...] = (None, None)
        if self.bias:
            biases = getattr(self, f"bias_ih_l{layer}"), getattr(self, f"bias_hh_l{layer}")
        cell = Cell(self.function, self.backend, self.num_heads)
        return fast_layer(cell, (x, *weights, *biases, *(before or ())))

    def _layer(
        self, layer: int, x: Tensor, before: States | None, lengths: Tensor | None
    ) -> tuple[Tensor, States]:
        """One layer: both directions in one call, as heads that do not see each other."""
        time, batch, _ = x.shape
        x = x.contiguous()  # so that what is made of it has time outermost in memory, too
        dim = self.hidden_size // self.num_heads
        weights = [self._weights(f"l{layer}{end}") for end in ("", "_reverse")[: self._directions]]
        inputs = [
            linear(_flipped(x, lengths) if number else x, each.inputs).view(
                time, batch, SIZES[self.function].inputs, self.num_heads, dim
            )
            for number, each in enumerate(weights)
        ]
        initial = None
        if before is not None:
            initial = torch.stack(
                [state.transpose(0, 1).reshape(batch, 1, -1, dim) for state in before]
            )
        every, last = rnn(
            _joined(inputs, 3).transpose(0, 1),
            _joined([each.recurrent for each in weights], 1),
            _joined([each.bias for each in weights if each.bias is not None], 1)
            if self.bias
            else None,
            initial,
            function=self.function,
            backend=self.backend,
        )
        if lengths is not None:
            at = (lengths - 1).view(1, -1, 1, 1, 1).expand_as(last)
            last = every.gather(2, at)
        h = every[0].transpose(0, 1).unflatten(2, (self._directions, self.num_heads)).flatten(3)
        ends = last.squeeze(2).unflatten(2, (self._directions, self.num_heads)).flatten(3)
        parts = [_flipped(h[:, :, k], lengths) if k else h[:, :, k] for k in range(h.shape[2])]
        return _joined(parts, 2).contiguous(), [state.transpose(0, 1) for state in ends]

    def _weights(self, place: str) -> _Weights:
        """From torch's parameters: rows of ``weight_hh`` are gates, then heads, then units."""
        sizes, dim = SIZES[self.function], self.hidden_size // self.num_heads
        of_inputs, of_h = getattr(self, f"weight_ih_{place}"), getattr(self, f"weight_hh_{place}")
        recurrent = of_h.view(sizes.recurrent, self.num_heads, dim, dim)
        biases = None
        if self.bias:
            biases = [
                getattr(self, f"bias_{each}_{place}").view(-1, self.num_heads, dim)
                for each in ("ih", "hh")
            ]
        if self.function != "gru":
            return _Weights(of_inputs, recurrent, None if biases is None else _sum(*biases))
        # torch has r, z and n, where n's part of R comes first here.
        recurrent = torch.cat([recurrent[2:], recurrent[:2]])
        if biases is None:
            return _Weights(of_inputs, recurrent, None)
        given, own = biases
        both = _sum(given[:2], own[:2])
        return _Weights(of_inputs, recurrent, torch.cat([own[2:], both, given[2:]]))


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """``one + other``, with a gradient for each in memory of its own.

    Those of a sum are the same tensor. Of views of two parameters it becomes the gradient of both, and
    what is done to one in place, by clipping or by an optimizer, is done to the other.
    """
    return torch.sub(one, other, alpha=-1)


def _flipped(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (T, B, …) from each sequence's end; what is beyond a sequence's length stays where it is."""
    if lengths is None:
        return x.flip(0)
    times = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    turned = lengths - 1 - times
    index = torch.where(turned < 0, times, turned).unsqueeze(2).expand_as(x)
    return x.gather(0, index)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _packed_like(packed: PackedSequence, out: Tensor, lengths: Tensor) -> PackedSequence:
    """``out`` (T, B, …), packed as ``packed`` is."""
    order = packed.sorted_indices
    if order is not None:
        out, lengths = out.index_select(1, order), lengths[order.cpu()]
    data = pack_padded_sequence(out, lengths).data
    return PackedSequence(data, packed.batch_sizes, order, packed.unsorted_indices)


def _as_given(states: States) -> Tensor | tuple[Tensor, ...]:
    return states[0] if len(states) == 1 else tuple(states)
