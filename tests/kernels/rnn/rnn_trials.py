"""Recurrent networks on the emulator of a GPU, beside the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.problem import (
    SIZES,
    STRIDED,
    Clips,
    Direction,
    RnnProblem,
    Scope,
    stride_names,
)

#: Of results against the reference in float64.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Trial:
    """Sizes and options of a network.

    starts   whether there are states before the first step
    ends     whether the last states have gradients of their own
    graded   whether every state has gradients, and not h alone
    padded   elements between one batch and the next that belong to neither
    resets   whether states start anew here and there; where a first step has a reset, from states that
             are NaN
    steady   whether all steps of all batches get the same inputs, and f keeps most of a state
    """

    function: str
    batch: int
    time: int
    heads: int
    dim: int
    starts: bool = True
    ends: bool = True
    graded: bool = False
    padded: int = 0
    resets: bool = False
    steady: bool = False
    clips: Clips = field(default_factory=Clips)


class Tensors:
    """Everything that a trial takes and makes: ``exact`` in float64, and ``given`` in a dtype, with what
    kernels are to write full of NaN."""

    def __init__(self, trial: Trial, dtype: torch.dtype, seed: int = 0) -> None:
        self.trial, self.dtype = trial, dtype
        torch.manual_seed(seed)
        sizes = SIZES[trial.function]  # type: ignore[index]
        states, block = len(sizes.states), (trial.heads, trial.dim)
        steps_of = trial.batch, trial.time
        self.given: dict[str, Tensor | None] = {
            "inputs": self._spread(*steps_of, sizes.inputs, *block),
            "recurrent": self._new(
                sizes.recurrent, trial.heads, trial.dim, trial.dim, by=trial.dim**-0.5
            ),
            "bias": self._new(sizes.bias, *block).float(),
            "initial": self._new(states, trial.batch, *block) if trial.starts else None,
            "states_grad": self._spread_states(states if trial.graded else 1, *steps_of, *block),
            "final_grad": self._new(states, trial.batch, *block) if trial.ends else None,
        }
        if trial.steady:
            inputs, bias = _there(self.given["inputs"]), _there(self.given["bias"])
            inputs.copy_(inputs[:1, :1].clone())
            bias[1] += 4
        if trial.starts and trial.function == "slstm":
            initial = self.given["initial"]
            assert initial is not None
            initial[2] = initial[2].abs() + 1
            initial[1:3, :, :, ::3] = 0  # where i decides
        if trial.function == "slstm" and dtype != torch.float32:
            # Whether i or f gets what enters by c, n and m turns on which is larger, to the last bit.
            for name in ("states_grad", "final_grad"):
                tensor = self.given[name]
                if tensor is not None and len(tensor) == states:
                    tensor[1:] = 0
        exact = {name: t if t is None else t.double() for name, t in self.given.items()}
        reset = None
        if trial.resets:
            reset = torch.rand(steps_of) < 0.3
            reset[0, 0] = reset[-1, -1] = True
            if trial.starts:
                for tensors in (self.given, exact):
                    _there(tensors["initial"])[:, reset[:, 0]] = torch.nan
        out, cache = reference.forward(
            trial.function,  # type: ignore[arg-type]
            exact["inputs"],
            exact["recurrent"],
            exact["bias"],
            exact["initial"],
            trial.clips,
            reset,
        )
        grads, initial_grad = reference.backward(
            trial.function,  # type: ignore[arg-type]
            exact["recurrent"],
            out,
            exact["initial"],
            cache,
            exact["states_grad"],
            exact["final_grad"],
            trial.clips,
            reset=reset,
        )
        self.exact = {"states": out, "gates_grad": grads, "initial_grad": initial_grad}
        self.given |= {
            "reset": reset,
            "states": self._blank(self._spread_states(states, *steps_of, *block)),
            "cache": self._blank(self._spread(*steps_of, max(1, len(sizes.cache)), *block)),
            "gates_grad": self._blank(self._spread(*steps_of, sizes.bias, *block)),
            "initial_grad": self._blank(self._new(states, trial.batch, *block)),
        }

    def _new(self, *sizes: int, by: float = 1.0) -> Tensor:
        return (torch.randn(sizes) * by).to(self.dtype)

    def _spread(self, *sizes: int) -> Tensor:
        """With gaps between batches."""
        whole = self._new(sizes[0], sizes[1] + self.trial.padded, *sizes[2:])
        return whole[:, : sizes[1]]

    def _spread_states(self, states: int, *sizes: int) -> Tensor:
        whole = self._new(states, sizes[0], sizes[1] + self.trial.padded, *sizes[2:])
        return whole[:, :, : sizes[1]]

    @staticmethod
    def _blank(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan)

    def problem(self, scope: Scope, direction: Direction, training: bool = True) -> RnnProblem:
        """What the kernels are told of it."""
        trial, strides = self.trial, []
        places = {"state": 0, "batch": -4, "time": -3}
        for name, dimensions in STRIDED[scope, direction].items():
            tensor = self.given["states" if name == "before" else name]
            assert tensor is not None
            shift = -1 if tensor.dim() == 5 and name in ("inputs", "cache", "gates_grad") else 0
            strides += [
                tensor.stride(places[d] + (shift if d != "state" else 0)) for d in dimensions
            ]
        states_grad = self.given["states_grad"]
        assert states_grad is not None
        return RnnProblem(
            scope=scope,
            direction=direction,
            function=trial.function,  # type: ignore[arg-type]
            dtype=str(self.dtype).removeprefix("torch."),
            batch=trial.batch,
            time=trial.time,
            heads=trial.heads,
            dim=trial.dim,
            strides=tuple(strides),
            graded=len(states_grad),
            training=training,
            clips=trial.clips,
        )

    def error(self, *names: str) -> float:
        """The largest relative error of what kernels have written."""
        errors = []
        for name in names:
            found = self.given[name]
            assert found is not None
            parts = (
                zip(found, self.exact[name], strict=True)
                if "states" in name
                else [(found, self.exact[name])]
            )
            errors += [relative_error(out, expected) for out, expected in parts]
        return max(errors)

    def gate_errors(self) -> list[float]:
        """The relative error of the gradients of each gate by itself."""
        grads, exact = _there(self.given["gates_grad"]), self.exact["gates_grad"]
        pairs = zip(grads.unbind(2), exact.unbind(2), strict=True)
        return [relative_error(out, expected) for out, expected in pairs]


#: A steady sLSTM's c/n hardly changes, and the gradients of i and f are made of its changes: were these taken from
#: rounded states, f's would be wrong by a tenth in bfloat16.
STEADY = Trial("slstm", batch=3, time=11, heads=1, dim=32, starts=False, ends=False, steady=True)
STEADY_TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2}


def trials(function: str) -> list[Trial]:
    """One block and several, sizes that fill no tile, one step and more than a ring has slots, several
    groups one after the other, and options."""
    one = Trial(function, batch=2, time=3, heads=1, dim=16)
    return [
        one,
        replace(one, batch=1, time=1, heads=3, dim=48, starts=False),
        replace(one, batch=9, time=40, dim=32, graded=True, padded=1),
        replace(one, time=20, dim=80, heads=2, starts=False, ends=False),
        replace(one, clips=Clips(forward=0.2, recurrent=0.05), dim=32),
        replace(one, clips=Clips(recurrent_cut=True), dim=32, ends=False),
        replace(one, batch=9, time=20, heads=2, dim=32, graded=True, resets=True),
        replace(one, time=5, dim=80, clips=Clips(recurrent=0.05), starts=False, resets=True),
    ]


def step_by_step(tensors: Tensors, libraries: dict[str, Any]) -> None:
    """Forward and backward with a kernel of one step for each direction."""
    trial, given = tensors.trial, tensors.given
    sizes = SIZES[trial.function]  # type: ignore[index]
    inputs, recurrent, states, cache = (
        _there(given[name]) for name in ("inputs", "recurrent", "states", "cache")
    )
    block = (trial.batch, trial.heads, trial.dim)
    carry = torch.zeros(len(sizes.states), *block)
    if given["initial"] is not None:
        carry.copy_(given["initial"])
    by_head = recurrent.permute(1, 0, 2, 3).reshape(trial.heads, -1, trial.dim)
    before = given["initial"]
    problem = tensors.problem("step", "forward")
    for t in range(trial.time):
        terms = None
        if before is not None:
            terms = torch.matmul(before[0].transpose(0, 1), by_head.transpose(1, 2)).contiguous()
        here = {"terms": terms, "carry": carry, "bias": given["bias"], "inputs": inputs[:, t]}
        here |= {"states": states[:, :, t], "cache": cache[:, t] if sizes.cache else None}
        libraries["forward"].run(problem, here, seed=t)
        before = states[:, :, t]

    states_grad, gates_grad = _there(given["states_grad"]), _there(given["gates_grad"])
    carry = torch.zeros(len(sizes.states), *block)
    if given["final_grad"] is not None:
        carry.copy_(given["final_grad"])
    problem = tensors.problem("step", "backward")
    initial = given["initial"]
    terms = None
    for t in reversed(range(trial.time)):
        if t == 0 and initial is not None:
            problem = _with_strides(problem, "before", (initial.stride(0), initial.stride(1)))
        here = {
            "terms": terms,
            "carry": carry,
            "before": states[:, :, t - 1] if t > 0 else initial,
            "states": states[:, :, t],
            "cache": cache[:, t] if sizes.cache else None,
            "states_grad": states_grad[:, :, t],
            "gates_grad": gates_grad[:, t],
        }
        libraries["backward"].run(problem, here, seed=t)
        through = gates_grad[:, t, : sizes.recurrent].permute(2, 0, 1, 3)
        through = through.reshape(trial.heads, trial.batch, -1)
        terms = torch.matmul(through, by_head).contiguous()
    if not trial.clips.recurrent_cut:
        clip = trial.clips.recurrent
        carry[0] += _there(terms).transpose(0, 1).float().clamp(-clip, clip)
    _there(given["initial_grad"]).copy_(carry)


def _with_strides(problem: RnnProblem, tensor: str, strides: tuple[int, ...]) -> RnnProblem:
    names = stride_names(problem.scope, problem.direction)
    known = dict(zip(names, problem.strides, strict=True))
    dimensions = STRIDED[problem.scope, problem.direction][tensor]
    known |= {f"{tensor}_{d}": s for d, s in zip(dimensions, strides, strict=True)}
    return replace(problem, strides=tuple(known.values()))


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
