"""Train each module of scan_registry.nn and its counterpart for 60 steps of Adam, and compare them.

    python tools/train_modules.py [--device cpu] [--hidden N] [--time T]

The counterparts are torch.nn's; sLSTM's is written out below in torch's operators. Both start from the same
parameters and see the same input, in float32. Gradients are used in three ways: clipped by their norm,
scaled by a GradScaler, and accumulated over two backward passes and then clipped. All three change
gradients in place, so they find gradients that share memory. The table shows the largest difference of a
loss and of a weight. The exit status is 1 if a difference of losses is above 1e-5, or one of weights above
5e-5: Adam divides a gradient by its usual size, so rounding errors of the smallest gradients become steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, mse_loss

from scan_registry import nn

KINDS = ("LSTM", "GRU", "RNN", "SLSTM")
MANNERS = ("clipped", "scaled", "accumulated")
STEPS, RATE, CLIP = 60, 1e-3, 0.01
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 5e-5


@dataclass(frozen=True)
class Size:
    """Of the input, (T, B, I), and of the hidden state."""

    time: int = 7
    batch: int = 4
    inputs: int = 5
    hidden: int = 6


class PlainSLSTM(nn.SLSTM):
    """One layer of one head in torch's operators, which torch differentiates."""

    def forward(self, input: Tensor, hx: None = None) -> tuple[Tensor, Tensor]:
        """(T, B, I) to h at every step and after the last one, from states of zero."""
        h = c = n = m = input.new_zeros(input.shape[1], self.hidden_size)
        given = torch.nn.functional.linear(
            input, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0
        )
        every = []
        for step in given:
            i, f, z, o = (step + h @ self.weight_hh_l0.T).chunk(4, 1)
            log_f = logsigmoid(f)
            # h does not depend on m, so no gradient has to pass through it.
            m_new = torch.where(n == 0, i, torch.maximum(i, log_f + m)).detach()
            e, k = (i - m_new).exp(), (log_f + m - m_new).exp()
            c, n, m = k * c + e * z.tanh(), (k * n + e).clamp_min(1), m_new
            h = o.sigmoid() * c / n
            every.append(h)
        return torch.stack(every), h


def pair(kind: str, size: Size, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our module and its counterpart, with the same parameters."""
    ours = getattr(nn, kind)(size.inputs, size.hidden, device=device)
    counterpart = PlainSLSTM if kind == "SLSTM" else getattr(torch.nn, kind)
    other = counterpart(size.inputs, size.hidden, device=device)
    other.load_state_dict(ours.state_dict())
    return ours, other


def train(module: torch.nn.Module, x: Tensor, target: Tensor, manner: str) -> list[float]:
    """The losses of ``STEPS`` steps."""
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler(x.device.type, enabled=manner == "scaled")  # type: ignore[attr-defined]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2 if manner == "accumulated" else 1):
            loss = mse_loss(module(x)[0], target)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if manner != "scaled":
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
    return losses


def determined(module: torch.nn.Module) -> list[Tensor]:
    """The parameters that training determines: all but the biases of sLSTM's input gate.

    A constant added to all of that gate's pre-activations is added to m, and h stays as it is. So the
    gradient of those biases is zero but for rounding errors, of which Adam makes full steps.
    """
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    if isinstance(module, nn.SLSTM):
        for name in ("bias_ih_l0", "bias_hh_l0"):
            weights[name] = weights[name][module.hidden_size :]
    return [*weights.values()]


def compare(kind: str, manner: str, size: Size, device: str) -> tuple[float, float]:
    """The largest difference of losses, and of weights after training."""
    torch.manual_seed(3)
    modules = pair(kind, size, device)
    x = torch.randn(size.time, size.batch, size.inputs, device=device)
    target = torch.randn(size.time, size.batch, size.hidden, device=device)
    losses = [train(module, x, target, manner) for module in modules]
    return (
        max(abs(one - other) for one, other in zip(*losses, strict=True)),
        max(
            float((one - other).abs().max())
            for one, other in zip(*(determined(module) for module in modules), strict=True)
        ),
    )


def compare_all(size: Size, device: str) -> Iterator[tuple[str, str, float, float]]:
    """Kind, manner, and what ``compare`` gives."""
    for kind in KINDS:
        for manner in MANNERS:
            yield (kind, manner, *compare(kind, manner, size, device))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=64, help="units; the default is 64")
    parser.add_argument("--time", type=int, default=24, help="time steps; the default is 24")
    options = parser.parse_args()
    # cuDNN's networks would compute in TF32, whose errors are larger than what is looked for.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    table = Table("module", "gradients", "difference of losses", "difference of weights")
    passed = True
    size = Size(options.time, 8, 32, options.hidden)
    for kind, manner, of_losses, of_weights in compare_all(size, options.device):
        table.add_row(kind, manner, f"{of_losses:.1e}", f"{of_weights:.1e}")
        passed &= of_losses <= LOSS_TOLERANCE and of_weights <= WEIGHT_TOLERANCE
    Console().print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
