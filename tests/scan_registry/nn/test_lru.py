"""``LRU``: the paper's formula in complex128, the parameters of minimal-LRU, and how they begin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scan_registry import nn


def loop(m: nn.LRU, x: Tensor, h: Tensor | None = None) -> Tensor:
    """Orvieto et al. (2023), section 3."""
    decay = torch.exp(torch.complex(-m.nu_log.exp(), m.theta_log.exp()))
    B, C = torch.complex(m.B_re, m.B_im), torch.complex(m.C_re, m.C_im)
    h = torch.zeros(x.shape[0], m.d_hidden, dtype=torch.complex128) if h is None else h
    outputs = []
    for t in range(x.shape[1]):
        h = decay * h + m.gamma_log.exp() * (x[:, t].to(B.dtype) @ B.T)
        outputs.append((h @ C.T).real + m.D * x[:, t])
    return torch.stack(outputs, 1)


def test_it_is_the_formula() -> None:
    torch.manual_seed(0)
    m, x = nn.LRU(5, 7, dtype=torch.float64), torch.randn(3, 17, 7).double()
    h = torch.randn(3, 5, dtype=torch.complex128)
    torch.testing.assert_close(m(x), loop(m, x))
    torch.testing.assert_close(m(x, initial_state=h), loop(m, x, h))


def test_the_state_dict_is_minimal_lrus() -> None:
    m = nn.LRU(5, 7, dtype=torch.bfloat16)
    assert {name: tuple(value.shape) for name, value in m.state_dict().items()} == {
        "theta_log": (5,),
        "nu_log": (5,),
        "gamma_log": (5,),
        "B_re": (5, 7),
        "B_im": (5, 7),
        "C_re": (7, 5),
        "C_im": (7, 5),
        "D": (7,),
    }
    wide = {name for name, p in m.named_parameters() if p.dtype == torch.float32}
    assert wide == {"theta_log", "nu_log", "gamma_log"}


def test_decays_begin_on_the_ring() -> None:
    torch.manual_seed(0)
    m = nn.LRU(20000, 3, 0.4, 0.9, 1.5, dtype=torch.float64)
    radii, phases = torch.exp(-m.nu_log.detach().exp()), m.theta_log.detach().exp()
    assert float(radii.min()) == pytest.approx(0.4, abs=1e-3)
    assert float(radii.max()) == pytest.approx(0.9, abs=1e-3)
    # Evenly over the ring's area: squares are uniform.
    assert float(radii.square().mean()) == pytest.approx((0.16 + 0.81) / 2, abs=0.005)
    assert 0 <= float(phases.min()) < 0.01
    assert 1.49 < float(phases.max()) <= 1.5
    torch.testing.assert_close(m.gamma_log.detach().exp(), (1 - radii.square()).sqrt())


@pytest.mark.parametrize("radii", [(0.0, 1.0), (0.999999, 1.0)])
def test_no_decay_begins_at_0_or_1(radii: tuple[float, float]) -> None:
    torch.manual_seed(0)
    m = nn.LRU(100000, 1, *radii)
    assert all(p.isfinite().all() for p in m.parameters())
    assert bool((torch.exp(-m.nu_log.exp()) < 1).all())
