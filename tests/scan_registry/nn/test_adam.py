"""Modules train as torch.nn's do, whatever is done to gradients in place: 60 steps of Adam from the same parameters.

sLSTM's counterpart is written out in torch's operators. Gradients are clipped by their norm, scaled by a GradScaler, or accumulated
over two backward passes and then clipped. All three change gradients in place, so they find gradients that share memory. Adam
divides a gradient by its usual size, so rounding errors of the smallest gradients become steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
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
        inputs = torch.nn.functional.linear(
            input, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0
        )
        outputs = []
        for step in inputs:
            i, f, z, o = (step + h @ self.weight_hh_l0.T).chunk(4, 1)
            log_f = logsigmoid(f)
            # h does not depend on m, so no gradient has to pass through it.
            m_new = torch.where(n == 0, i, torch.maximum(i, log_f + m)).detach()
            e, k = (i - m_new).exp(), (log_f + m - m_new).exp()
            c, n, m = k * c + e * z.tanh(), (k * n + e).clamp_min(1), m_new
            h = o.sigmoid() * c / n
            outputs.append(h)
        return torch.stack(outputs), h


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


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_adam_steps_match_torch(kind: str, manner: str) -> None:
    of_losses, of_weights = compare(kind, manner, Size(), "cpu")
    assert of_losses <= LOSS_TOLERANCE
    assert of_weights <= WEIGHT_TOLERANCE


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """torch's products without TF32. Its settings are no attributes that monkeypatch could take back."""
    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = False
    yield
    for setting, allowed in zip(settings, before, strict=True):
        setting.allow_tf32 = allowed


@pytest.mark.gpu
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_adam_steps_match_torch_on_a_gpu(kind: str, manner: str, exact_float32: None) -> None:
    of_losses, of_weights = compare(kind, manner, Size(24, 8, 32, 64), "cuda")
    assert of_losses <= LOSS_TOLERANCE
    assert of_weights <= WEIGHT_TOLERANCE
