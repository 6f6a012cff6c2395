"""LSTM, GRU, RNN and SLSTM as torch.nn has, or would have, them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from scan_registry.kernels.rnn.problem import SIZES, Function, RnnBackend
from scan_registry.ops.rnn import rnn
from scan_registry.ops.rnn_layout import padded

States = list[Tensor]


class _Weights(NamedTuple):
    """One layer's, of one direction, as ``rnn`` takes them."""

    inputs: Tensor
    recurrent: Tensor
    bias: Tensor | None


class _Recurrent(torch.nn.RNNBase):
    """What the modules share; parameters, their names and their initialisation are torch.nn's."""

    function: Function

    def __init__(
        self, mode: str, *args: Any, backend: RnnBackend = "auto", heads: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(mode, *args, **kwargs)
        if self.proj_size:
            raise ValueError(
                f"proj_size is {self.proj_size}; accepted is 0: there are no projections"
            )
        self.backend: RnnBackend = backend
        self.heads = heads

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
        if pool is not None and "heads" in self.__dict__:  # set last
            heads = self.heads * self._directions
            pool.rnn_buffers.release(self.function, heads, padded(self.hidden_size // self.heads))

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
            TypeError, ValueError: a shape or dtype is not as described.
        """
        if isinstance(input, torch.fx.Proxy):
            return self._traced(input, hx)
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input)
            out, last = self._layers(x, self._states(hx, x), lengths.to(x.device))
            return _packed_like(input, out, lengths), _as_given(last)
        if not isinstance(input, Tensor) or input.dim() not in (2, 3):
            what = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(f"input is {what}; accepted are tensors of 2 and 3 dimensions")
        if input.dim() == 2:
            x = input.unsqueeze(1)
            given = self._several(hx)
            before = None if given is None else [state.unsqueeze(1) for state in given]
            out, last = self._layers(x, self._states(before, x))
            return out.squeeze(1), _as_given([state.squeeze(1) for state in last])
        x = input.transpose(0, 1) if self.batch_first else input
        out, last = self._layers(x, self._states(hx, x))
        return out.transpose(0, 1) if self.batch_first else out, _as_given(last)

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

    def _several(self, hx: Any) -> States | None:
        return None if hx is None else [hx] if isinstance(hx, Tensor) else [*hx]

    def _states(self, hx: Any, x: Tensor) -> States | None:
        """The states before the first step, checked."""
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"input has {x.shape[-1]} features; this module was made for {self.input_size}"
            )
        states, names = self._several(hx), SIZES[self.function].states
        if states is None:
            return None
        shape = (self.num_layers * self._directions, x.shape[1], self.hidden_size)
        shapes = [tuple(state.shape) for state in states]
        if shapes != [shape] * len(names):
            raise ValueError(f"hx has shapes {shapes}; {', '.join(names)} must be {shape} each")
        return states

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
            x, last = self._layer(layer, x, before, lengths)
            ends.append(last)
        return x, [torch.cat(state) for state in zip(*ends, strict=True)]

    def _layer(
        self, layer: int, x: Tensor, before: States | None, lengths: Tensor | None
    ) -> tuple[Tensor, States]:
        """One layer: both directions in one call, as heads that do not see each other."""
        time, batch, _ = x.shape
        x = x.contiguous()  # so that what is made of it has time outermost in memory, too
        dim = self.hidden_size // self.heads
        weights = [self._weights(f"l{layer}{end}") for end in ("", "_reverse")[: self._directions]]
        inputs = [
            linear(_flipped(x, lengths) if number else x, each.inputs).view(
                time, batch, SIZES[self.function].inputs, self.heads, dim
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
        h = every[0].transpose(0, 1).unflatten(2, (self._directions, self.heads)).flatten(3)
        ends = last.squeeze(2).unflatten(2, (self._directions, self.heads)).flatten(3)
        parts = [_flipped(h[:, :, k], lengths) if k else h[:, :, k] for k in range(h.shape[2])]
        return _joined(parts, 2).contiguous(), [state.transpose(0, 1) for state in ends]

    def _weights(self, place: str) -> _Weights:
        """From torch's parameters: rows of ``weight_hh`` are gates, then heads, then units."""
        sizes, dim = SIZES[self.function], self.hidden_size // self.heads
        of_inputs, of_h = getattr(self, f"weight_ih_{place}"), getattr(self, f"weight_hh_{place}")
        recurrent = of_h.view(sizes.recurrent, self.heads, dim, dim)
        biases = None
        if self.bias:
            biases = [
                getattr(self, f"bias_{each}_{place}").view(-1, self.heads, dim)
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


class LSTM(_Recurrent):
    """``torch.nn.LSTM``, but for ``proj_size``; ``backend`` is that of ``scan_registry.rnn``."""

    function = "lstm"

    def __init__(self, *args: Any, backend: RnnBackend = "auto", **kwargs: Any) -> None:
        super().__init__("LSTM", *args, backend=backend, **kwargs)


class GRU(_Recurrent):
    """``torch.nn.GRU``; ``backend`` is that of ``scan_registry.rnn``."""

    function = "gru"

    def __init__(self, *args: Any, backend: RnnBackend = "auto", **kwargs: Any) -> None:
        super().__init__("GRU", *args, backend=backend, **kwargs)


class RNN(_Recurrent):
    """``torch.nn.RNN`` with ``nonlinearity="tanh"``; ``backend`` is that of ``scan_registry.rnn``."""

    function = "elman"

    def __init__(
        self, *args: Any, nonlinearity: str = "tanh", backend: RnnBackend = "auto", **kwargs: Any
    ) -> None:
        if len(args) > 3:  # torch's fourth
            nonlinearity, args = args[3], (*args[:3], *args[4:])
        if nonlinearity != "tanh":
            raise ValueError(f"nonlinearity is {nonlinearity!r}; accepted is 'tanh'")
        self.nonlinearity = nonlinearity
        super().__init__("RNN_TANH", *args, backend=backend, **kwargs)


class SLSTM(_Recurrent):
    """sLSTM, with the arguments of ``torch.nn.LSTM`` and ``num_heads``, which do not see each other
    within a layer. The states are (h, c, n, m).

    Parameters are called as in ``torch.nn.LSTM``. Of ``weight_hh``, (4 · H, H / heads), rows are gates i, f,
    z, o, then heads, then units; columns are the units of the row's head.

    Raises:
        ValueError: ``num_heads`` does not divide ``hidden_size``.
    """

    function = "slstm"

    def __init__(
        self, *args: Any, num_heads: int = 1, backend: RnnBackend = "auto", **kwargs: Any
    ) -> None:
        super().__init__("LSTM", *args, backend=backend, heads=num_heads, **kwargs)
        if num_heads < 1 or self.hidden_size % num_heads:
            raise ValueError(
                f"num_heads is {num_heads}; it must divide hidden_size, {self.hidden_size}"
            )
        for name, weight in [*self.named_parameters()]:
            if name.startswith("weight_hh"):
                columns = self.hidden_size // num_heads
                setattr(self, name, torch.nn.Parameter(weight.detach()[:, :columns].clone()))


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
