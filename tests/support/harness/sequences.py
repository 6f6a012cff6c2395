"""Sequences that are packed along time, and such as are computed in pieces."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .calls import Call, results
from .operator import Operator
from .values import exactly


class Sequences(Operator):
    def test_packed_sequences_are_each_alone(self, packed: str) -> None:
        """Outputs, final states and gradients."""
        for size in (self.small, self.sizes[0]):
            call = self.draw(packed, size, self.exact)

            def alone(call: Call = call, **arguments: Any) -> tuple[Tensor, ...]:
                leaves = Call({n: arguments[n] for n in call.tensors}, call.others)
                parts = [
                    self.run(**self.cut(leaves, begin, end, number).arguments)
                    for number, (begin, end) in enumerate(self.bounds(call))
                ]
                out = torch.cat([out for out, *_ in parts], self.time(call, "output 0") or 0)
                return out, self.states(call, [last for _, last in parts])

            exactly(results(self.run, call), results(alone, call))

    def test_pieces_make_the_whole(self, whole: str) -> None:
        """Each starts from the final state of the one before."""
        call = self.draw(whole, self.sizes[0], self.exact)
        dim = self.time(call, "output 0")
        assert dim is not None
        time = self.run(**call.arguments)[0].shape[dim]

        def pieces(**arguments: Any) -> tuple[Tensor, ...]:
            leaves = Call({n: arguments[n] for n in call.tensors}, call.others)
            parts, more = [], {}
            cuts = [*pairwise([0, 1, 1, time // 2, time])]
            for begin, end in reversed(cuts) if call.others.get("reverse") else cuts:
                own = self.cut(leaves, begin, end).arguments | more
                out, last = self.run(**own)
                more = {self.initial[0]: last}
                parts.append(out)
            return torch.cat(parts[::-1] if call.others.get("reverse") else parts, dim), last

        exactly(results(self.run, call), results(pieces, call))

    def test_nothing_crosses_the_bounds_of_packed_sequences(self, packed: str) -> None:
        """Neither forwards nor backwards, whatever a sequence holds: the others have the same bits."""
        call = self.draw(packed, self.sizes[0], torch.float32)
        number, (begin, end) = max(enumerate(self.bounds(call)), key=lambda x: x[1][1] - x[1][0])
        clean, spoilt = results(self.run, call), call.leaves([])
        timed = [n for n in call.tensors if self.time(call, n) is not None]
        for value in self.cut(spoilt, begin, end, number).tensors.items():
            name, part = value
            if name in timed or name in self.initial:
                part.fill_(math.nan)
        actual = results(self.run, spoilt)
        for name in ["output 0", *(f"gradient of {n}" for n in timed)]:
            dim = self.time(call, name.removeprefix("gradient of "))
            assert dim is not None
            times = 2 if name.removeprefix("gradient of ") in self.paired(call) else 1
            for out in (clean[name], actual[name]):
                out.narrow(dim, begin * times, (end - begin) * times).zero_()
            assert torch.equal(actual[name], clean[name]), name
        for out in (clean["output 1"], actual["output 1"]):
            self.state(call, out, number).zero_()
        assert torch.equal(actual["output 1"], clean["output 1"])
