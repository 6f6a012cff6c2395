"""A user's program that uses every public name. A test has it type-checked, and runs it on the CPU."""

from __future__ import annotations

import tempfile
import warnings

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from typing_extensions import assert_type

import scan_registry
from scan_registry import compat, distributed, nn
from scan_registry.compat import accelerated_scan, flashrnn, mamba_ssm, sequential_scan
from scan_registry.compat import causal_conv1d as compat_conv1d
from scan_registry.compat.causal_conv1d import cpp_functions
from scan_registry.compat.flashrnn import FlashRNNConfig


def scans(gates: Tensor, tokens: Tensor, final: bool) -> Tensor:
    """Every overload of ``linear_scan``."""
    states = scan_registry.linear_scan(gates, tokens)
    assert_type(states, Tensor)
    both = scan_registry.linear_scan(gates, tokens, dim=1, return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = scan_registry.linear_scan(gates, tokens, reverse=True, return_final_state=final)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    bounds = torch.tensor([0, 3, gates.shape[-1]])
    packed = scan_registry.linear_scan(gates, tokens, cu_seqlens=bounds, backend="reference")
    summary = scan_registry.linear_scan_summary(gates, tokens, dim=-1, reverse=True)
    assert_type(summary, tuple[Tensor, Tensor])
    return states + both[0] + packed + summary[1].unsqueeze(-1)


def gated_scans(x: Tensor, final: bool) -> Tensor:
    """Every overload of ``gated_scan`` and of its kinds, and resets."""
    reset = torch.rand(x.shape[0], x.shape[2]) < 0.5
    states = scan_registry.gated_scan("min_gru", x, x)
    assert_type(states, Tensor)
    both = scan_registry.gated_scan("linear", x, x, reset=reset, return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = scan_registry.gated_scan("rg_lru", x, x, x, x[0, :, 0], return_final_state=final)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(scan_registry.linear_scan(x, x, reset=reset), Tensor)
    gru = scan_registry.min_gru(x, x, activation="identity")
    assert_type(gru, Tensor)
    lstm = scan_registry.min_lstm(x, x, x, return_final_state=True)
    assert_type(lstm, tuple[Tensor, Tensor])
    lru = scan_registry.rg_lru(x, x, x, x[0, :, 0], reset, return_final_state=final)
    assert_type(lru, Tensor | tuple[Tensor, Tensor])
    bounded = scan_registry.hgrn(x, x, 0.5, dim=1, reverse=True)
    return states + both[0] + gru + lstm[0] + bounded + scan_registry.hgrn(x, x)


def steps() -> Tensor:
    """Operators of one step, in place of a state."""
    state = torch.zeros(2, 3)
    assert_type(scan_registry.linear_scan_step(state, torch.rand(3), torch.ones(2, 3)), Tensor)
    rows = scan_registry.StateRows(torch.zeros(4, 3), torch.tensor([3, 0]))
    stepped = scan_registry.linear_scan_step(rows, torch.rand(3), torch.ones(2, 3))
    assert_type(stepped, Tensor)
    wide, x, B = torch.zeros(2, 3, 4), torch.randn(2, 3), torch.randn(2, 4)
    out = scan_registry.selective_state_update(
        wide, x, x, -torch.ones(3, 4), B, B, dt_softplus=True
    )
    assert_type(out, Tensor)
    return out + state


def convolutions(x: Tensor, final: bool) -> Tensor:
    """Every overload of ``causal_conv1d``, its step, and the functions of the package that ``compat`` replaces."""
    weight, bias = torch.randn(x.shape[1], 4), torch.randn(x.shape[1])
    y = scan_registry.causal_conv1d(x, weight, bias, activation="silu", backend="auto")
    assert_type(y, Tensor)
    both = scan_registry.causal_conv1d(x, weight, initial_state=None, return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = scan_registry.causal_conv1d(x, weight, seq_idx=None, return_final_state=final)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    step = scan_registry.causal_conv1d_update(x[..., 0], both[1], weight, bias, "silu")
    assert_type(step, Tensor)
    found = compat_conv1d.causal_conv1d_fn(x, weight, bias, activation="swish")
    assert isinstance(found, Tensor)
    compat_conv1d.causal_conv1d_update(x[..., 0], both[1], weight)
    states = compat_conv1d.causal_conv1d_varlen_states(x[0].T, torch.tensor([0, 3]), 2)
    forward = cpp_functions.causal_conv1d_fwd_function(x, weight, bias, None, None, None, True)
    assert_type(forward, Tensor)
    cpp_functions.causal_conv1d_bwd_function(
        x, weight, bias, forward, None, None, None, None, False, True
    )
    cpp_functions.causal_conv1d_update_function(x, both[1], weight, bias, True, None, None)
    return y + found + states.sum()


def networks() -> Tensor:
    """``rnn``, and what it keeps."""
    wx, r = torch.randn(2, 5, 4, 3, 8), torch.randn(4, 3, 8, 8)
    every, last = scan_registry.rnn(wx, r, None, function="lstm", backend="auto")
    again, _ = scan_registry.rnn(wx, r, torch.zeros(4, 3, 8), last, forward_clipval=1.0)
    marks, bounds = torch.zeros(2, 5, dtype=torch.bool), torch.tensor([0, 2, 5])
    scan_registry.rnn(wx, r, None, reset=marks, reset_states=last, cu_seqlens=None)
    scan_registry.rnn(wx, r, None, cu_seqlens=bounds, max_seqlen=3)
    assert_type(scan_registry.rnn_buffers.size, int)
    scan_registry.rnn_buffers.max_size = 1 << 20
    assert_type(scan_registry.rnn_buffers.clear(), int)
    return every + again


def selective_scans(final: bool) -> Tensor:
    """Every overload of ``selective_scan``."""
    u, delta = torch.randn(2, 1, 4, 6)
    A, B, C = -torch.rand(4, 3), torch.randn(1, 3, 6), torch.randn(1, 2, 3, 6)
    out = scan_registry.selective_scan(u, delta, A, B, C)
    assert_type(out, Tensor)
    both = scan_registry.selective_scan(u, delta, A, B, C, torch.ones(4), return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = scan_registry.selective_scan(
        u,
        delta,
        A,
        B,
        C,
        z=u,
        delta_bias=torch.zeros(4),
        delta_softplus=True,
        return_final_state=final,
    )
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    bounds = torch.tensor([0, 2, 6])
    packed = scan_registry.selective_scan(
        u, delta, A, B, C, initial_state=torch.zeros(1, 2, 4, 3), cu_seqlens=bounds
    )
    return out + both[0] + packed


def dual_scans(final: bool) -> Tensor:
    """Every overload of ``ssd_scan``."""
    x, dt, A = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2), -torch.ones(2)
    B, C = torch.randn(2, 1, 6, 1, 3)
    out = scan_registry.ssd_scan(x, dt, A, B, C)
    assert_type(out, Tensor)
    both = scan_registry.ssd_scan(x, dt, A, B, C, torch.ones(2), x, return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = scan_registry.ssd_scan(
        x, dt, A, B, C, dt_softplus=True, dt_limit=(0.0, 0.5), return_final_state=final
    )
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    bounds, numbers = torch.tensor([0, 2, 6]), torch.zeros(1, 6, dtype=torch.int32)
    packed = scan_registry.ssd_scan(
        *(x, dt, A, B, C), cu_seqlens=bounds, seq_idx=numbers, chunk_size=2, backend="reference"
    )
    return out + both[0] + packed


def modules(x: Tensor) -> Tensor:
    """Each module with a tensor, a packed sequence and states."""
    lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, device="cpu", dtype=torch.float32)
    out, (h, c) = lstm(x)
    assert_type(out, Tensor)
    out, states = lstm(x, (h, c))
    assert_type(states, tuple[Tensor, Tensor])
    packed, _ = lstm(pack_sequence([x[0], x[1]]))
    assert_type(packed, PackedSequence)
    gru = nn.GRU(5, 6, bidirectional=True)
    assert_type(gru(x), tuple[Tensor, Tensor])
    marks = torch.zeros(x.shape[:2], dtype=torch.bool)
    assert_type(gru(x, reset=marks, reset_hx=None), tuple[Tensor, Tensor])
    elman = nn.RNN(5, 6, nonlinearity="tanh", backend="reference")
    assert_type(elman(x, None)[1], Tensor)
    slstm = nn.SLSTM(5, 6, num_heads=2)
    _, (h, c, n, m) = slstm(x)
    assert_type(slstm.forward(x)[1], tuple[Tensor, Tensor, Tensor, Tensor])
    return out + h.sum() + c.sum() + n.sum() + m.sum()


def layers(x: Tensor, final: bool) -> Tensor:
    """Each layer on a scan with a sequence and with one step, and every overload of its call."""
    width, reset = x.shape[-1], torch.zeros(x.shape[:2], dtype=torch.bool)
    gru = nn.MinGRU(width, 1.5, activation="identity", batch_first=True, backend="auto")
    y, state = gru(x, reset=reset, return_final_state=True)
    assert_type(gru(x, initial_state=state, reverse=True), Tensor)
    assert_type(gru(x, return_final_state=final), Tensor | tuple[Tensor, Tensor])
    assert_type(gru.step(x[:, 0], state, reset=reset[:, 0]), tuple[Tensor, Tensor])
    _, hidden = gru(x, None, return_next_prev_hidden=True)
    assert_type(gru(x, hidden), Tensor)
    lstm = nn.MinLSTM(width, proj_out=True, device="cpu", dtype=torch.float32)
    y = y + lstm(x, cu_seqlens=torch.tensor([0, 1, x.shape[1]]))
    y = y + nn.RGLRU(width, 1, w_init_variance_scale=0.5)(x, reset=reset)
    hgrn = nn.HGRN(width, 2, elementwise_affine=False, norm_eps=1e-6)
    assert_type(hgrn(x, lower_bound=0.1, return_final_state=True), tuple[Tensor, Tensor])
    y = y + hgrn(x, lower_bound=torch.rand(2 * width)) + hgrn.step(x[:, 0])[0].unsqueeze(1)
    lru = nn.LRU(7, width, r_min=0.9, r_max=0.99, max_phase=1.0)
    assert_type(lru(x), Tensor)
    s5 = nn.S5(width, 6, block_count=2, bidir=True, bcInit="dense", discretization="bilinear")
    assert_type(s5(x, 0.5, return_final_state=True), tuple[Tensor, Tensor])
    return y + lru(x) + s5(x, torch.ones(x.shape[0]), reset=reset)


def mamba(x: Tensor) -> Tensor:
    """The module: a sequence, and one step after the other; and what transformers calls."""
    model = nn.Mamba(x.shape[-1], d_state=8, dt_rank="auto", bias=True, backend="auto")
    whole = model(x)
    assert_type(whole, Tensor)
    states = model.allocate_inference_cache(x.shape[0], x.shape[1])
    assert_type(states, tuple[Tensor, Tensor])
    start = model(x[:, :-1], states=states)
    last, conv_state, ssm_state = model.step(x[:, -1:], *states)
    assert conv_state.shape[1] == ssm_state.shape[1]
    a = -model.A_log.exp()
    inner = mamba_ssm.ops.selective_scan_interface.mamba_inner_fn(
        *(model.in_proj(x).mT, model.conv1d.weight, model.conv1d.bias, model.x_proj.weight),
        *(model.dt_proj.weight, model.out_proj.weight, model.out_proj.bias, a),
        D=model.D,
        delta_bias=model.dt_proj.bias,
    )
    assert_type(inner, Tensor)
    scans = mamba_ssm.ops.selective_scan_interface
    u, b = torch.randn(2, model.d_inner, 4), torch.randn(2, model.d_state, 4)
    scanned = scans.selective_scan_fn(u, u, a, b, b, delta_softplus=True)
    assert_type(scanned, Tensor)
    scanned, state = scans.selective_scan_ref(u, u, a, b, b, return_last_state=True)
    one = mamba_ssm.ops.triton.selective_state_update.selective_state_update(
        *(state, u[..., 0], u[..., 0], a, b[..., 0], b[..., 0])
    )
    assert_type(one, Tensor)
    assert [mamba_ssm.Mamba, mamba_ssm.mamba_inner_fn, mamba_ssm.selective_scan_fn]
    assert [scans.mamba_inner_ref, mamba_ssm.modules]
    assert compat.causal_conv1d
    assert [scan_registry.causal_conv1d, scan_registry.causal_conv1d_update]
    assert scan_registry.selective_scan.__doc__
    compat.install("mamba_ssm", "causal_conv1d")
    compat.uninstall()
    return whole + inner + torch.cat([start, last], 1)


def mamba2(x: Tensor) -> Tensor:
    """The module: a sequence, packed sequences, and one step after the other; and its norm."""
    model = nn.Mamba2(x.shape[-1], d_state=8, headdim=5, dt_limit=(0.0, 1.0), backend="auto")
    whole = model(x)
    assert_type(whole, Tensor)
    states = model.allocate_inference_cache(x.shape[0], x.shape[1])
    assert_type(states, tuple[Tensor, Tensor])
    start = model(x[:, :-1], states=states)
    last, *_ = model.step(x[:, -1:], *states)
    packed = model(x[:1], cu_seqlens=torch.tensor([0, 2, x.shape[1]]))
    numbers = torch.zeros(x.shape[:2], dtype=torch.int32)
    norm = nn.RMSNormGated(x.shape[-1], eps=1e-6, group_size=1, norm_before_gate=False)
    assert_type(norm(x, x), Tensor)
    combined = mamba_ssm.ops.triton.ssd_combined
    y: Tensor = combined.mamba_split_conv1d_scan_combined(
        *(model.in_proj(x), model.conv1d.weight.squeeze(1), model.conv1d.bias, model.dt_bias),
        *(-model.A_log.exp(), model.D, model.chunk_size),
        headdim=model.headdim,
    )
    heads = y.view(*x.shape[:2], model.nheads, model.headdim)
    one = torch.ones(*x.shape[:2], 1, 4)
    scanned, state = combined.mamba_chunk_scan_combined(
        *(heads, heads[..., 0], -model.A_log.exp(), one, one, 64), return_final_states=True
    )
    assert scanned.shape[2:] == state.shape[1:3]
    gated = mamba_ssm.ops.triton.layernorm_gated
    y = gated.rmsnorm_fn(x, norm.weight, None, z=x) + gated.layernorm_fn(x, norm.weight, norm.bias)
    assert_type(gated.LayerNorm(x.shape[-1])(gated.RMSNorm(x.shape[-1])(x, x)), Tensor)
    assert [mamba_ssm.Mamba2, mamba_ssm.modules.mamba2.Mamba2]
    simple = mamba_ssm.modules.mamba2_simple.Mamba2Simple(8, headdim=4, learnable_init_states=True)
    simple(torch.randn(2, 5, 8))
    return whole + packed + model(x, seq_idx=numbers) + y + norm(torch.cat([start, last], 1))


def replacements(gates: Tensor, tokens: Tensor) -> Tensor:
    """The functions of the packages that ``compat`` replaces."""
    total = accelerated_scan.warp.scan(gates, tokens)
    total = total + accelerated_scan.warp.scan_forward(gates, tokens, reverse=True)
    total = total + accelerated_scan.scalar.scan(gates, tokens)
    total = total + accelerated_scan.triton.scan(gates, tokens)
    total = total + accelerated_scan.ref.scan(gates, tokens, mul=torch.mul, add=torch.add)
    total = total + accelerated_scan.complex.scan(gates.to(torch.complex64), tokens).real
    total = total + compat.sequential_scan.scan_cu(gates, tokens)
    total = total + sequential_scan.scan_cu_single(gates, tokens)
    total = total + sequential_scan.scan_tr(gates, tokens)
    config = FlashRNNConfig(function="gru", backend="vanilla", dtype="float32")
    wx, r, b = torch.randn(2, 5, 3, 1, 8), torch.randn(3, 1, 8, 8), torch.zeros(4, 1, 8)
    every, last = flashrnn.flashrnn(wx, r, b, config=config)
    return total + every.sum() + last.sum()


def over_ranks(gates: Tensor, tokens: Tensor, final: bool) -> Tensor:
    """Every overload of the scan over ranks, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    states = distributed.linear_scan(gates, tokens, group=group)
    assert_type(states, Tensor)
    both = distributed.linear_scan(gates, tokens, return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = distributed.linear_scan(gates, tokens, reverse=True, return_final_state=final)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    gated = distributed.gated_scan("min_gru", gates, tokens, group=group)
    assert_type(gated, Tensor)
    sizes, A, B = gates.abs(), -torch.ones(3, 4), torch.rand(2, 4, 8)
    out = distributed.selective_scan(tokens, sizes, A, B, B, group=group)
    assert_type(out, Tensor)
    heads, D = torch.rand(2, 8, 3, 4), torch.ones(3)
    of_heads = distributed.ssd_scan(
        heads, heads[..., 0], -D, heads, heads, D, return_final_state=True, group=group
    )
    assert_type(of_heads, tuple[Tensor, Tensor])
    summary = distributed.scan_summary(gates, tokens, dim=-1)
    assert_type(summary, tuple[Tensor, Tensor])
    filters = torch.ones(tokens.shape[1], 4)
    y = distributed.causal_conv1d(tokens, filters, group=group)
    assert_type(y, Tensor)
    both = distributed.causal_conv1d(tokens, filters, return_final_state=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = distributed.causal_conv1d(tokens, filters, return_final_state=final)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    torch.distributed.destroy_process_group()
    return states + both[0] + summary[1].unsqueeze(-1)


def inspection(gates: Tensor, tokens: Tensor) -> str:
    """What is installed, what would run, and what is allowed to."""
    explanation = scan_registry.explain(scan_registry.linear_scan, gates, tokens)
    lines = [str(explanation), str(scan_registry.catalogue()), scan_registry.__version__]
    warnings.simplefilter("error", scan_registry.FallbackWarning)
    try:
        with scan_registry.require("reference"):
            scan_registry.linear_scan(gates, tokens)
    except scan_registry.NoKernelError as error:
        lines.append(str(error))
    return "\n".join(lines)


def main() -> None:
    assert "linear_scan" in scan_registry.jax.__all__  # whose use needs JAX
    """Each of them once."""
    gates, tokens = torch.rand(2, 3, 8), torch.randn(2, 3, 8)
    assert scans(gates, tokens, final=True).shape == tokens.shape
    assert gated_scans(tokens, final=True).shape == tokens.shape
    assert steps().shape == (2, 3)
    assert convolutions(tokens, final=True).shape == tokens.shape
    assert networks().dim() == 5
    assert selective_scans(final=True).shape == (1, 4, 6)
    assert dual_scans(final=True).shape == (1, 6, 2, 4)
    assert modules(torch.randn(2, 7, 5)).shape == (2, 7, 6)
    assert layers(torch.randn(1, 7, 5), final=True).shape == (1, 7, 5)
    assert mamba(torch.randn(2, 7, 5)).shape == (2, 7, 5)
    assert mamba2(torch.randn(2, 7, 5)).shape == (2, 7, 5)
    assert replacements(gates, tokens).shape == tokens.shape
    assert over_ranks(gates, tokens, final=True).shape == tokens.shape
    assert "linear_scan" in inspection(gates, tokens)


if __name__ == "__main__":
    main()
