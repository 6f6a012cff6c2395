"""What the recurrent modules share: parameters as torch.nn has them, and layers over ``rnn``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.fx
from torch import Tensor
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence

from scan_registry.base.package import NAME
from scan_registry.kernels.rnn.op.function import rnn
from scan_registry.kernels.rnn.op.layer import fast_layer, on_gpu
from scan_registry.kernels.rnn.op.layer_composed import Cell
from scan_registry.kernels.rnn.op.layout import padded
from scan_registry.kernels.rnn.problem import SIZES, Function, RnnBackend
from scan_registry.nn import checks, projected, torch_cells
from scan_registry.nn.exports import Exports
from scan_registry.nn.packing import Packing, Resets, turned_resets
from scan_registry.nn.states import States, as_given, as_tensors, batched, by_heads, joined

#: The module that keeps buffers, which may not be imported.
_BUFFERS = f"{NAME}.kernels.rnn.op.buffers"
#: The states before the first step and after the last one: a tensor, or a tuple of them.
StateT = TypeVar("StateT")
#: Sequences, and resets and results with them.
InputT = TypeVar("InputT", Tensor, PackedSequence)


class _Weights(NamedTuple):
    """One layer's, of one direction, as ``rnn`` takes them."""

    inputs: Tensor
    recurrent: Tensor
    bias: Tensor | None


class Recurrent(Exports, torch.nn.RNNBase, Generic[StateT]):
    """What the modules share; parameters, their names and their initialisation are torch.nn's."""

    operators: tuple[str, ...] = ("rnn",)
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
        proj_size: int = 0,
    ) -> None:
        checks.check_constructor(
            {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers},
            *(bidirectional, dropout, dtype, backend),
        )
        super().__init__(
            mode,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device=device,
            dtype=dtype,
        )
        checks.check_heads(num_heads, hidden_size)
        self.backend: RnnBackend = backend
        self.num_heads = num_heads
        if proj_size:  # there is no kernel
            self.operators = ()

    def extra_repr(self) -> str:
        """As torch.nn's, and what else is not the default."""
        parts = [super().extra_repr()]
        if self.num_heads != 1:
            parts.append(f"num_heads={self.num_heads}")
        if self.backend != "auto":
            parts.append(f"backend={self.backend!r}")
        return ", ".join(parts)

    def flatten_parameters(self) -> None:
        """Does nothing, as the kernels take parameters as they lie; but for those that cuDNN takes."""
        if self.proj_size:
            super().flatten_parameters()

    def __prepare_scriptable__(self) -> Any:
        """torch.jit.script asks for this first; what it would say by itself names our insides."""
        raise RuntimeError(
            f"torch.jit.script cannot compile scan_registry.nn.{type(self).__name__}; use torch.compile, torch.export or "
            "torch.jit.trace, or script torch.nn's module with its weights"
        )

    def __del__(self) -> None:
        # At the interpreter's end there may be no modules any more, nor ``sys``.
        known = getattr(sys, "modules", None)
        pool = known.get(_BUFFERS) if known else None
        if pool is not None and "num_heads" in self.__dict__:  # set last
            heads, dim = self.num_heads * self._directions, self.hidden_size // self.num_heads
            pool.rnn_buffers.release(self.function, heads, padded(dim))

    if TYPE_CHECKING:  # calls go through torch.nn.Module's, which has no types

        def __call__(
            self,
            input: InputT,
            hx: StateT | None = None,
            *,
            reset: InputT | None = None,
            reset_hx: StateT | None = None,
        ) -> tuple[InputT, StateT]: ...

    def forward(
        self, input: Any, hx: Any = None, *, reset: Any = None, reset_hx: Any = None
    ) -> tuple[Any, StateT]:
        """As torch.nn's: the last layer's h at every step, and the states after the last step.

        Args:
            input: (T, B, I), with ``batch_first`` (B, T, I), unbatched (T, I), or a ``PackedSequence``.
            hx: the states before the first step, (layers · directions, B, H) each, without B if
                unbatched; a tuple where there are several. Zeros if None.
            reset: bool, with the dimensions of ``input`` but I: True at the first steps of episodes, where
                the states of all layers start anew. Nothing before such a step has an effect after it, even
                if it is infinite or NaN. The direction that goes backwards starts anew at the last steps of
                episodes, which are the steps before the marked ones. If ``input`` is a ``PackedSequence``,
                so is ``reset``, with the same lengths and order.
            reset_hx: as ``hx``: the states that a reset starts from; None for zeros.

        Returns:
            h, laid out as ``input`` and with directions · H features; and states as ``hx``. Strides are
            those of torch.nn's: time is outermost in memory, also with ``batch_first``.

        Raises:
            TypeError: ``input``, ``reset`` or a state is no tensor, no dense one, or no tuple of as many.
            ValueError: ``input`` has neither 2 nor 3 dimensions, a dtype is not the parameters', or
                ``reset_hx`` is given without ``reset``.
            RuntimeError: another size is not as described, or devices differ. These are the types that
                torch.nn raises. The error about a dtype is a ``TypeError``, too.
        """
        tried = type(input) is Tensor and self.num_layers == 1 and reset_hx is None
        tried = tried and not self.proj_size
        if tried and (done := self._at_once(input, hx, reset)) is not None:
            return done
        if isinstance(input, torch.fx.Proxy):
            traced: tuple[Any, StateT] = self._traced(input, hx, reset, reset_hx)
            return traced
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, reset, reset_hx)
        return self._dense(input, hx, reset, reset_hx, tried)

    def _dense(
        self, input: Tensor, hx: Any, reset: Any, reset_hx: Any, tried: bool
    ) -> tuple[Any, Any]:
        """The same of a tensor. ``tried``: that ``_at_once`` takes it not is known."""
        checks.check_input(self, input)
        checks.check_reset(self, reset, reset_hx, input)
        x = input if input.dim() == 3 else input.unsqueeze(1)
        first = self.batch_first and input.dim() == 3
        x = x.transpose(0, 1) if first else x
        batch = x.shape[1] if input.dim() == 3 else None
        states = batched(checks.states_of(self, hx, input, batch), batch)
        if self.proj_size:
            return self._projected(input, states, reset, reset_hx)
        steps = x.shape[0], x.shape[0] * x.shape[1]
        if reset is None and torch_cells.takes(self, input, steps):
            out, final_state = torch_cells.run(self, x, states, first=False)
        else:
            resets = None
            if reset is not None:
                anew = checks.states_of(self, reset_hx, input, batch, "reset_hx")
                marks = reset.unsqueeze(0) if batch is None else reset if first else reset.t()
                resets = self._resets(marks.contiguous(), None, batched(anew, batch))
            out, final_state = self._layers(x, states, None, resets, tried and batch is not None)
        if batch is None:
            out, final_state = out.squeeze(1), [state.squeeze(1) for state in final_state]
        return out.transpose(0, 1) if first else out, as_given(final_state)

    def _projected(
        self, input: Tensor, states: States | None, reset: Any, reset_hx: Any
    ) -> tuple[Any, Any]:
        """The same of a network with projections."""
        at = 0 if self.batch_first else 1  # of the batch
        batch = None if input.dim() == 2 else input.shape[at]
        anew = batched(checks.states_of(self, reset_hx, input, batch, "reset_hx"), batch)
        x, marks = (
            t if t is None or batch is not None else t.unsqueeze(at) for t in (input, reset)
        )
        out, final_state = projected.run(self, x, states, None, marks, anew)
        if batch is None:
            return out.squeeze(at), as_given([state.squeeze(1) for state in final_state])
        return out, as_given(final_state)

    def _at_once(self, x: Tensor, hx: Any, reset: Any) -> tuple[Any, Any] | None:
        """The results of one layer of one direction, of which a plan knows that all tensors are as they should be. None if
        they are not, or if no plan takes them."""
        if self.bidirectional or not on_gpu(x) or x.dim() != 3 or torch.compiler.is_compiling():
            return None
        states: Any = ()
        if hx is not None:
            states = as_tensors(hx, len(SIZES[self.function].states))
            if states is None:
                return None
        first = self.batch_first
        if reset is not None:
            plain = type(reset) is Tensor and not reset.is_nested and reset.layout == torch.strided
            if not plain or reset.shape != x.shape[:2]:
                return None
            reset = (reset if first else reset.t()).contiguous()
        results = fast_layer(self._cell, (x, *self._tensors(0), reset, *states), first)
        if results is None:
            return None
        out, final_state = results
        return out.transpose(0, 1) if first else out, as_given(final_state)

    def _packed(
        self, packed: PackedSequence, hx: Any, reset: Any, reset_hx: Any
    ) -> tuple[Any, Any]:
        """The same of a ``PackedSequence``."""
        x, order, inverse = packed.data, packed.sorted_indices, packed.unsorted_indices
        checks.check_input(self, x, packed=True)
        checks.check_packed_reset(self, reset, reset_hx, packed)
        batch = int(packed.batch_sizes[0])
        states = checks.states_of(self, hx, x, batch)
        anew = checks.states_of(self, reset_hx, x, batch, "reset_hx")
        if order is not None:
            states, anew = (
                s if s is None else [state.index_select(1, order) for state in s]
                for s in (states, anew)
            )
        if self.proj_size:
            marks = None if reset is None else reset.data
            data, final_state = projected.run(self, x, states, packed.batch_sizes, marks, anew)
        elif reset is None and torch_cells.takes(self, x, (packed.batch_sizes.numel(), x.shape[0])):
            data, final_state = torch_cells.run(self, x, states, packed.batch_sizes)
        else:
            data, final_state = self._sequences(packed, states, reset, anew)
        if inverse is not None:
            final_state = [state.index_select(1, inverse) for state in final_state]
        return PackedSequence(data, packed.batch_sizes, order, inverse), as_given(final_state)

    def _sequences(
        self,
        packed: PackedSequence,
        states: States | None,
        reset: PackedSequence | None,
        anew: States | None,
    ) -> tuple[Tensor, States]:
        """The data of the output, and the last states. The layers run on the sequences laid out one after the
        other."""
        packing, resets = Packing.of(packed), None
        if reset is not None:
            marks = reset.data.index_select(0, packing.order).unsqueeze(0)
            resets = self._resets(marks, packing, anew)
        x = packed.data.index_select(0, packing.order).unsqueeze(1)
        out, final_state = self._layers(x, states, packing, resets)
        return out.squeeze(1).index_select(0, packing.back), final_state

    def _traced(self, input: Any, hx: Any, reset: Any, reset_hx: Any) -> Any:
        """A call of this module in the graph that torch.fx makes: as torch.nn's, it is traced no further."""
        path = input.tracer.path_of_module(self)
        if not path:
            raise TypeError(
                f"scan_registry.nn.{type(self).__name__} cannot be torch.fx's root, like torch.nn's; "
                "trace a module that holds it"
            )
        arguments = (input,) if hx is None else (input, hx)
        resets = {"reset": reset, "reset_hx": reset_hx}
        keywords = {name: value for name, value in resets.items() if value is not None}
        return input.tracer.create_proxy("call_module", path, arguments, keywords)

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _resets(self, marks: Tensor, packing: Packing | None, anew: States | None) -> Resets:
        turned = turned_resets(marks, packing) if self.bidirectional else None
        return Resets(marks, turned, anew)

    def _layers(
        self,
        x: Tensor,
        states: States | None,
        packing: Packing | None = None,
        resets: Resets | None = None,
        tried: bool = False,
    ) -> tuple[Tensor, States]:
        """All layers, over x (T, B, I): h (T, B, directions · H), and the last states. With ``packing`` B is 1
        in x and h, and in states B is the number of sequences. ``tried``: that ``_fast_layer`` takes none is known."""
        ends: list[States] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = dropout(x, self.dropout, self.training)
            rows = slice(layer * self._directions, (layer + 1) * self._directions)
            layer_states = None if states is None else [state[rows] for state in states]
            whole = None
            if packing is None and not tried:
                whole = self._fast_layer(layer, x, layer_states, resets)
                if whole is not None and self.num_layers == 1:
                    return whole
            own = resets
            if resets is not None and resets.states is not None:
                own = resets._replace(states=[state[rows] for state in resets.states])
            x, final_state = whole or self._layer(layer, x, layer_states, packing, own)
            ends.append(final_state)
        return x, [torch.cat(state) for state in zip(*ends, strict=True)]

    def _fast_layer(
        self, layer: int, x: Tensor, states: States | None, resets: Resets | None
    ) -> tuple[Tensor, States] | None:
        """One layer of one direction as one function of autograd; None if ``_layer`` has to compute it."""
        if self.bidirectional or not on_gpu(x) or torch.compiler.is_compiling():
            return None
        if resets is not None and resets.states is not None:
            return None
        marks = None if resets is None else resets.marks
        return fast_layer(self._cell, (x, *self._tensors(layer), marks, *(states or ())))

    @property
    def _cell(self) -> Cell:
        return Cell(self.function, self.backend, self.num_heads)

    def _tensors(self, layer: int) -> tuple[Tensor | None, ...]:
        """The weights and biases of one layer of one direction."""
        names, own = self._all_weights[layer], self._parameters
        try:  # as getattr finds them, but faster
            weights = [own[name] for name in names]
        except KeyError:  # there is a parametrization
            weights = [getattr(self, name) for name in names]
        return (*weights,) if self.bias else (*weights, None, None)

    def _layer(
        self,
        layer: int,
        x: Tensor,
        states: States | None,
        packing: Packing | None,
        resets: Resets | None,
    ) -> tuple[Tensor, States]:
        """One layer: both directions in one call of ``rnn``, as heads that do not see each other. With resets
        each direction has a call, as the backward direction starts anew at other steps."""
        time, batch, _ = x.shape
        x = x.contiguous()  # so that what is made of it has time outermost in memory, too
        dim = self.hidden_size // self.num_heads
        weights = [self._weights(f"l{layer}{end}") for end in ("", "_reverse")[: self._directions]]
        inputs = [
            linear(_flipped(x, packing) if number else x, weight.inputs).view(
                time, batch, SIZES[self.function].inputs, self.num_heads, dim
            )
            for number, weight in enumerate(weights)
        ]
        lead = (batch, 1) if packing is None else (1, packing.cu_seqlens.shape[0] - 1)
        initial_state = None if states is None else by_heads(states, lead, dim)
        if resets is None:
            every, final_state = self._heads(inputs, weights, initial_state, packing)
        else:
            anew = None if resets.states is None else by_heads(resets.states, lead, dim)
            directions = []
            for k, marks in enumerate((resets.marks, resets.turned)[: self._directions]):
                start, restart = (
                    t if t is None else t.narrow(3, k * self.num_heads, self.num_heads)
                    for t in (initial_state, anew)
                )
                own = [inputs[k]], [weights[k]]
                directions.append(self._heads(*own, start, packing, marks, restart))
            every, final_state = (joined([*parts], 3) for parts in zip(*directions, strict=True))
        h = every[0].transpose(0, 1).unflatten(2, (self._directions, self.num_heads)).flatten(3)
        ends = final_state.flatten(1, 2).unflatten(2, (self._directions, self.num_heads)).flatten(3)
        parts = [_flipped(h[:, :, k], packing) if k else h[:, :, k] for k in range(h.shape[2])]
        return joined(parts, 2).contiguous(), [state.transpose(0, 1) for state in ends]

    def _heads(
        self,
        inputs: list[Tensor],
        weights: list[_Weights],
        initial_state: Tensor | None,
        packing: Packing | None,
        reset: Tensor | None = None,
        reset_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One call of ``rnn``, of the heads of one direction or of both."""
        return rnn(
            joined(inputs, 3).transpose(0, 1),
            joined([weight.recurrent for weight in weights], 1),
            joined([weight.bias for weight in weights if weight.bias is not None], 1)
            if self.bias
            else None,
            initial_state,
            function=self.function,
            backend=self.backend,
            cu_seqlens=None if packing is None else packing.cu_seqlens,
            reset=reset,
            reset_states=reset_states,
        )

    def _weights(self, place: str) -> _Weights:
        """From torch's parameters: rows of ``weight_hh`` are gates, then heads, then units."""
        sizes, dim = SIZES[self.function], self.hidden_size // self.num_heads
        of_inputs, of_h = getattr(self, f"weight_ih_{place}"), getattr(self, f"weight_hh_{place}")
        recurrent = of_h.view(sizes.recurrent, self.num_heads, dim, dim)
        biases = None
        if self.bias:
            biases = [
                getattr(self, f"bias_{source}_{place}").view(-1, self.num_heads, dim)
                for source in ("ih", "hh")
            ]
        if self.function != "gru":
            return _Weights(of_inputs, recurrent, None if biases is None else _sum(*biases))
        # torch has r, z and n, where n's part of R comes first here.
        recurrent = torch.cat([recurrent[2:], recurrent[:2]])
        if biases is None:
            return _Weights(of_inputs, recurrent, None)
        of_input, of_state = biases
        both = _sum(of_input[:2], of_state[:2])
        return _Weights(of_inputs, recurrent, torch.cat([of_state[2:], both, of_input[2:]]))


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """``one + other``, with a gradient for each in memory of its own.

    Those of a sum are the same tensor. Of views of two parameters it becomes the gradient of both, and
    what is done to one in place, by clipping or by an optimizer, is done to the other.
    """
    return torch.sub(one, other, alpha=-1)


def _flipped(x: Tensor, packing: Packing | None) -> Tensor:
    """x (T, B, …) with time reversed; each packed sequence is reversed alone."""
    return x.flip(0) if packing is None else x.index_select(0, packing.turned)
