"""Random problems for the causal_conv1d kernels, with what the float64 reference makes of them.

``selftest`` and ``tools/attest.py`` run binaries on these one by one, so that every pointer parameter and every option of
every kernel is covered, whether or not a public function passes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scan_registry.base.alignment import common_alignment
from scan_registry.kernels import cases
from scan_registry.kernels.cases import in_float64, on_device, relative_error, there
from scan_registry.kernels.causal_conv1d import reference
from scan_registry.kernels.causal_conv1d.problem import (
    STRIDED,
    ConvProblem,
    Direction,
    Layout,
    ReductionProblem,
    Strides,
    UpdateProblem,
)
from scan_registry.kernels.causal_conv1d.reference import UpdateRows
from scan_registry.kernels.causal_conv1d.spec import DIRECTIONS, FAMILY, LAYOUTS, pieces

#: Largest ‖out − ref‖ / ‖ref‖ of a binary that counts as GPU-tested.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}

Shape = tuple[int, int, int]

#: (batch, channels, time): less than a filter, few and many chunks, and sizes that are a multiple of nothing.
QUICK: tuple[Shape, ...] = ((2, 24, 40), (2, 33, 130), (1, 136, 1032))
SMALL = QUICK
THOROUGH: tuple[Shape, ...] = (
    (2, 8, 1),
    (1, 1, 3),
    (3, 40, 8),
    (2, 17, 31),
    (2, 264, 520),
    (1, 129, 4099),
    (4, 768, 1024),
    (1, 8, 20_000),
    (33, 64, 196),
)
_GAP = 16  # elements between rows that have gaps


@dataclass(frozen=True)
class Setting:
    """The options of a problem.

    starts     whether there is an initial state
    ends       whether the final state is wanted, and has a gradient
    sequences  how many are packed along time, in one batch; empty ones among them
    indexed    whether sequences are marked by their numbers, padding among them
    """

    width: int = 4
    silu: bool = True
    bias: bool = True
    wide: bool = True
    starts: bool = False
    ends: bool = False
    sequences: int = 0
    indexed: bool = False


SETTINGS = (
    Setting(),
    Setting(width=3, wide=False, starts=True, ends=True),
    Setting(width=4, bias=False, silu=False, starts=True),
    Setting(width=7, starts=True, ends=True),
    Setting(width=2, ends=True, wide=False, silu=False),
    Setting(width=8, starts=True, ends=True, silu=False),
    Setting(sequences=5, starts=True, ends=True),
    Setting(width=4, indexed=True),
    Setting(width=8, sequences=9),
    Setting(width=6, indexed=True, starts=True, ends=True, wide=False),
    Setting(width=2, sequences=3, ends=True, starts=True, silu=False),
)

#: What each kernel writes.
OUTPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("y", "final_state"),
    "backward": ("x_grad", "initial_state_grad"),
}
#: Of states, the one that sequences without steps leave as it is.
_ENTERING = {"final_state": "initial_state", "initial_state_grad": "final_state_grad"}
_KERNELS: dict[str, tuple[Layout, Direction]] = {
    f"{layout}_{direction}": (layout, direction) for layout in LAYOUTS for direction in DIRECTIONS
}


@dataclass(frozen=True)
class Case(cases.Case):
    """One launch to make: every pointer parameter by name, outputs poisoned, and what to expect. ``sums`` is what
    ``partials`` are to add up to."""

    problem: ConvProblem | ReductionProblem | UpdateProblem

    def error_of(self, name: str, out: Tensor, expected: Tensor) -> float:
        if not expected.numel():
            return 0.0
        among = None
        if isinstance(self.problem, ReductionProblem):  # few sums of many terms, which may cancel
            terms = there(self.tensors["partials"])
            among = terms.double() * len(terms) ** 0.5
        return relative_error(out.double().sum(0) if name == "partials" else out, expected, among)


class Trial(cases.RandomTrial[Setting]):
    """Inputs of one problem in one dtype, and the results in float64."""

    def case(self, kernel: str, *, aligned: bool) -> Case:
        """The launch of ``kernel`` that computes this, in memory of its own; unless ``aligned``, with gaps between rows
        and off the boundaries of 16 bytes."""
        if kernel == "reduction":
            return self._reduction()
        if kernel == "update":
            return self._update(aligned, "time_last")
        layout, direction = _KERNELS[kernel]
        tensors: dict[str, Tensor | None] = {}
        for name in ("weight", "bias", "initial_state", "seq_idx", "cu_seqlens"):
            tensors[name] = _copy(self.inputs[name])
        if direction == "backward":
            tensors["final_state_grad"] = _copy(self.inputs["final_state_grad"])
        for name in STRIDED[direction]:
            drawn = self.inputs.get(name)
            blank = torch.full_like(there(self.inputs["x"]), torch.nan)
            tensors[name] = _placed(blank if drawn is None else drawn, layout, aligned)
        expected = {
            name: self.expected[name] for name in OUTPUTS[direction] if name in self.expected
        }
        for name, value in expected.items():
            if name not in tensors:
                tensors[name] = self._poisoned(name, value)
        problem = self._problem(layout, direction, tensors)
        if direction == "backward":
            of = expected["partials"] = self.expected["partials"]
            most = _most_pieces(kernel, problem)
            tensors["partials"] = torch.zeros(most, *of.shape, device=of.device)
        return Case(problem, tensors, expected)

    def _poisoned(self, name: str, like: Tensor) -> Tensor:
        """Memory for an output. Kernels write none for sequences without steps, which keep the state that enters."""
        out = torch.full_like(like, torch.nan, dtype=getattr(torch, self.dtype))
        if name in _ENTERING and self.setting.sequences:
            entering = self.inputs[_ENTERING[name]]
            out.copy_(torch.zeros(()) if entering is None else entering)
        return out

    def _problem(
        self, layout: Layout, direction: Direction, tensors: dict[str, Tensor | None]
    ) -> ConvProblem:
        placed = [there(tensors[name]) for name in STRIDED[direction]]
        batch, channels, time = self.shape
        return ConvProblem(
            *(direction, layout, self.dtype),
            *(batch, channels, time, self.setting.width),
            strides=tuple(Strides(*tensor.stride()) for tensor in placed),
            alignment=min(16, *(tensor.data_ptr() & -tensor.data_ptr() for tensor in placed)),
            sequences=self.setting.sequences,
            indexed=self.setting.indexed,
            silu=self.setting.silu,
            wide_weights=self.setting.wide and self.dtype != "float32",
        )

    def _reduction(self) -> Case:
        """Of pieces that are drawn; the gradients in float32."""
        batch, channels, _ = self.shape
        width = self.setting.width
        device = there(self.inputs["x"]).device
        partials = torch.randn(37 * batch, width + 1, channels).to(device)
        sums = partials.double().sum(0)
        expected = {"weight_grad": sums[:width].flip(0).T.contiguous(), "bias_grad": sums[width]}
        tensors: dict[str, Tensor | None] = {
            name: torch.full_like(value, torch.nan, dtype=torch.float32)
            for name, value in expected.items()
        }
        tensors["partials"] = partials
        return Case(ReductionProblem("float32", 37 * batch, channels, width), tensors, expected)

    def launches(self, kernel: str) -> Iterator[Case]:
        """Of an update, also with channels that lie together."""
        for aligned in (True, False):
            yield self.case(kernel, aligned=aligned)
        if kernel == "update":
            yield self._update(aligned=False, layout="channel_last")

    def _update(self, aligned: bool, layout: Layout) -> Case:
        """Of the first steps of the trial; unless ``aligned``, with rows by number, of packed sequences, of drafts or of
        rings, by the setting. The layout is that of x and y."""
        setting, packed = self.setting, bool(self.setting.sequences) and not aligned
        batch, channels, time = self.shape
        x = there(self.inputs["x"])[..., : 1 if aligned else 30 if packed else min(3, time)]
        x = _placed(x, layout, aligned or layout == "channel_last")
        steps = x.shape[2]
        sequences = setting.sequences if packed else batch
        slots = sequences if aligned else 2 * sequences + 2
        state = self._drawn_state(slots, aligned, x)
        rows = UpdateRows() if aligned else self._rows(sequences, slots, steps, packed, x.device)
        weight, bias = self.inputs["weight"], self.inputs["bias"]
        after = state.double()
        filters = there(weight).double(), None if bias is None else bias.double()
        y = reference.update(x.double(), after, *filters, rows, setting.silu)
        out = _placed(torch.full_like(x, torch.nan), layout, True)
        tensors = {
            "x": x,
            "state": state.clone(),
            "weight": _copy(weight),
            "bias": _copy(bias),
            **{name: getattr(rows, name) for name in rows._fields[:-1]},
            "y": out,
        }
        problem = UpdateProblem(
            self.dtype,
            *(batch, channels, steps, setting.width),
            slots=slots,
            length=state.shape[2],
            strides=(
                Strides(*x.stride()),
                Strides(*there(tensors["state"]).stride()),
                Strides(*out.stride()),
            ),
            silu=setting.silu,
            wide_weights=setting.wide and self.dtype != "float32",
            sequences=sequences if packed else 0,
            pad_slot_id=rows.pad_slot_id,
            wide_bounds=getattr(rows.cu_seqlens, "dtype", None) == torch.int64,
            alignment=common_alignment(
                t.data_ptr()
                for name in ("x", "state", "weight", "bias", "y")
                if (t := tensors[name]) is not None
            ),
            in_order=rows.positions is None and rows.accepted is None,
        )
        return Case(problem, tensors, {"y": y, "state": after})

    def _drawn_state(self, slots: int, aligned: bool, x: Tensor) -> Tensor:
        """Like x. Inputs of Mamba's states lie together by four, or by three."""
        setting, channels = self.setting, self.shape[1]
        if aligned:
            length = setting.width - (not setting.bias or setting.width != 4)
            return torch.randn(slots, channels, length).to(x.dtype).to(x.device)
        state = torch.randn(slots, channels, setting.width + 2).to(x.dtype).to(x.device)
        return _placed(state, "channel_last", True)

    def _rows(
        self, sequences: int, slots: int, steps: int, packed: bool, device: torch.device
    ) -> UpdateRows:
        """Rows by number, of which the first, or the one of ``pad_slot_id``, is none. Rings, rows of drafts and neither."""
        setting = self.setting
        order = torch.randperm(slots).to(torch.int32)
        indices, destinations = order[:sequences].clone(), order[sequences : 2 * sequences].clone()
        by_ring = not packed and setting.bias and not (setting.starts and setting.ends)
        drafts = not by_ring and setting.bias and setting.width % 2 == 0
        padding = -1 if by_ring else int(indices[0])
        if by_ring:
            indices[0] = -1
        else:
            destinations[-1] = -1
        inner = torch.randint(0, steps + 1, (sequences,)).sort().values
        bounds = torch.cat([inner.new_zeros(1), inner])
        numbers: dict[str, Tensor | None] = {
            "positions": torch.randint(0, 50, (sequences,)).to(torch.int32) if by_ring else None,
            "indices": indices,
            "destinations": None if by_ring else destinations,
            "cu_seqlens": bounds.to(torch.int32 if drafts else torch.int64) if packed else None,
            "accepted": torch.randint(1, 5, (sequences,)).to(torch.int32) if drafts else None,
        }
        return UpdateRows(**on_device(numbers, device), pad_slot_id=padding)


def _most_pieces(kernel: str, problem: ConvProblem) -> int:
    """As many as any variant writes; what one does not write is zero."""
    of = FAMILY.kernel(kernel, "cuda")
    return max(pieces(v, problem) for v in of.variants if not of.rules.accepts(v, problem))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def _placed(tensor: Tensor, layout: Layout, aligned: bool) -> Tensor:
    """A copy whose time, or whose channels, are contiguous."""
    ordered = tensor if layout == "time_last" else tensor.transpose(1, 2)
    if aligned:
        placed = ordered.clone(memory_format=torch.contiguous_format)
    else:
        memory = ordered.new_full((*ordered.shape[:2], ordered.shape[2] + _GAP + 1), torch.nan)
        placed = memory[..., 1 : 1 + ordered.shape[2]].copy_(ordered)
    return placed if layout == "time_last" else placed.transpose(1, 2)


def draw(shape: Shape, setting: Setting, dtype: str, device: torch.device | str) -> Trial:
    """Fresh random inputs. Drawn, and solved in float64, on the CPU: only the kernels under test run on ``device``."""
    narrow, width = getattr(torch, dtype), setting.width
    batch, channels, time = shape
    if setting.sequences:
        batch, shape = 1, (1, channels, time)

    def new(*size: int) -> Tensor:
        return torch.randn(size).to(narrow)

    of_state = setting.sequences or batch, channels, width - 1
    weights = torch.float32 if setting.wide else narrow
    inputs: dict[str, Tensor | None] = {
        "x": new(*shape),
        "weight": (torch.randn(channels, width) * width**-0.5).to(weights),
        "bias": torch.randn(channels).to(weights) if setting.bias else None,
        "initial_state": new(*of_state) if setting.starts else None,
        "seq_idx": _numbered(batch, time) if setting.indexed else None,
        "cu_seqlens": _bounds(setting.sequences, time) if setting.sequences else None,
        "y_grad": new(*shape),
        "final_state_grad": new(*of_state) if setting.ends else None,
    }
    wide = in_float64(inputs)
    runs = reference.Runs(wide["seq_idx"], wide["cu_seqlens"])
    filters = there(wide["weight"]), wide["bias"], wide["initial_state"]
    x = there(wide["x"])
    y, final = reference.forward(x, *filters, runs, setting.silu, setting.ends)
    grads = reference.backward(
        x, *filters, there(wide["y_grad"]), wide["final_state_grad"], runs, setting.silu
    )
    expected = {"y": y, "x_grad": grads.x}
    expected["partials"] = torch.cat([grads.weight.flip(1).T, grads.bias.unsqueeze(0)])
    if final is not None:
        expected["final_state"] = final
    if setting.starts:
        expected["initial_state_grad"] = grads.state
    return Trial(
        shape,
        setting,
        dtype,
        on_device(inputs, device),
        on_device({name: t.contiguous() for name, t in expected.items()}, device),
    )


def _bounds(sequences: int, time: int) -> Tensor:
    inner = torch.randint(0, time + 1, (sequences - 1,)).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([time])])


def _numbered(batch: int, time: int) -> Tensor:
    """Runs of a few steps and of many, and padding at the end."""
    changes = (torch.rand(batch, time) < min(0.2, 20 / time)).cumsum(1)
    padding = torch.arange(time) >= time - time // 5
    return torch.where(padding, torch.tensor(-1), changes).to(torch.int32)


def trials(dtype: str, shapes: tuple[Shape, ...], device: torch.device | str) -> Iterator[Trial]:
    """Four settings for each shape, all in turn."""
    return cases.in_turn(draw, SETTINGS, 4, dtype, shapes, device)
