"""``linear_scan`` on a GPU, through the public function, against the float64 reference."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from processes import captured

import scan_registry
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.linear_scan import reference
from scan_registry.kernels.linear_scan.cases import TOLERANCE, wide

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded")]

DEVICE = "cuda"
BACKENDS = ("cuda", "triton")


def gates_of(*shape, dtype):
    """Random gates of |gate| ≤ 1, many of them close to 1."""
    dtype = getattr(torch, dtype)
    gates = 1 - torch.rand(*shape, device=DEVICE, dtype=torch.float64) ** 3
    if dtype.is_complex:
        gates = torch.polar(gates, 6.28 * torch.rand_like(gates))
    return gates.to(dtype)


def normal(*shape, dtype):
    return torch.randn(*shape, device=DEVICE, dtype=getattr(torch, dtype))


def inputs(*shape, dtype="float32", grad=True):
    tensors = gates_of(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    return [t.requires_grad_(grad) for t in tensors]


# --- Without options --------------------------------------------------------------------------


def expected(gates, tokens, weight, dim):
    """Float64 states and gradients of (states * weight).sum()."""
    gates, tokens = wide(gates.detach()), wide(tokens.detach())
    states, _ = reference.forward(gates, tokens, dim=dim)
    gates_grad, tokens_grad, _ = reference.backward(gates, states, wide(weight), dim=dim)
    return states, gates_grad, tokens_grad


def check(gates, tokens, dim, backend, dtype):
    states = scan_registry.linear_scan(gates, tokens, dim=dim, backend=backend)
    weight = torch.randn_like(states)
    grads = torch.autograd.grad(states, (gates, tokens), weight)
    for out, ref in zip((states, *grads), expected(gates, tokens, weight, dim), strict=True):
        assert out.shape == ref.shape
        assert relative_error(out, ref) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1,), 0),
        ((131,), -1),
        ((3, 5), 0),
        ((100_000, 3), 1),
        ((2, 64, 1024), -1),
        ((2, 1024, 64), 1),
        ((3, 37, 509), -1),
        ((3, 509, 37), 1),
        ((2, 3, 4, 65, 8), 3),
        ((2, 65, 3, 8), 1),
        ((2, 2, 2, 2, 33), -1),
    ],
)
def test_shapes(shape, dim, dtype, backend):
    gates, tokens = inputs(*shape, dtype=dtype)
    check(gates, tokens, dim, backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t[:, 1:, :],
        lambda t: t[..., 1:],
        lambda t: t[..., ::2],
        lambda t: t[:1].expand(6, -1, -1),
        lambda t: t[..., :1].expand(-1, -1, 40),
        lambda t: t.permute(2, 0, 1),
    ],
)
def test_views(view, backend):
    gates, tokens = inputs(6, 40, 72)
    check(view(gates), view(tokens), -1, backend, "float32")
    check(view(gates), view(tokens).contiguous(), -1, backend, "float32")


# --- With options -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Options of a scan over (batch, channels, time), or over (2, batch, channels, time).

    broadcast  the dimensions along which gates are broadcast
    mixed      whether gates are float32 whatever the dtype
    states     shape of the initial state, "b" and "c" for batch and channels; none if empty
    """

    states: str = "bc"
    reverse: bool = False
    packed: bool = False
    broadcast: str = ""
    mixed: bool = False
    outer: bool = False

    def size(self):
        """Of tokens and weights: so small that sums over them, squared, are in float16's range."""
        return 1 / 32 if self.broadcast else 1

    def __str__(self):
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value)


SETTINGS = [
    Setting(),
    Setting(reverse=True),
    Setting(packed=True),
    Setting(packed=True, reverse=True),
    Setting(states="", packed=True),
    Setting(states="c", broadcast="t"),
    Setting(broadcast="bt", reverse=True),
    Setting(broadcast="c", packed=True),
    Setting(broadcast="b", states="", reverse=True),
    Setting(broadcast="bct", packed=True, reverse=True),
    Setting(outer=True, broadcast="b"),
    Setting(outer=True, broadcast="oct", packed=True),
    Setting(mixed=True),
    Setting(mixed=True, broadcast="bt", packed=True, reverse=True),
]
#: Batch, channels and time: one tile and less, several, and many rows.
SIZES = [(3, 37, 129), (2, 65, 1030), (40, 520, 7)]


def offsets(time, dtype=torch.int32):
    """Bounds of sequences: empty ones, one of a single step, and what remains."""
    cuts = sorted({0, 1, time // 3, time // 2, time})
    return torch.tensor([0, *cuts, time], device=DEVICE, dtype=dtype)


def problem(setting, sizes, layout, dtype):
    """Gates, tokens and state, and the keywords to scan them with."""
    names = ("o" if setting.outer else "") + ("bct" if layout == "time_last" else "btc")
    size = dict(zip("obct", (2, *sizes), strict=True))
    shape = [size[name] for name in names]
    of_gates = [1 if name in setting.broadcast else size[name] for name in names]
    gates = gates_of(*of_gates, dtype="float32" if setting.mixed else dtype)
    tokens = normal(*shape, dtype=dtype) * setting.size()
    dim = names.index("t") - len(names)
    bounds = offsets(size["t"]) if setting.packed else None
    state = None
    if setting.states:
        sequences = 1 if bounds is None else len(bounds) - 1
        of_state = [
            sequences if n == "t" else size[n] if n in setting.states + "o" else 1 for n in names
        ]
        if bounds is None:
            del of_state[dim]
        compute = reference.compute_dtype(tokens.dtype)
        state = torch.randn(of_state, device=DEVICE, dtype=compute) * setting.size()
    return gates, tokens, state, {"dim": dim, "reverse": setting.reverse, "cu_seqlens": bounds}


def sum_and_size(elements, shape):
    """The sum over what is broadcast from ``shape``, and that of the absolute values: terms may
    cancel, so an error is to be compared with the latter."""
    return elements.sum_to_size(shape), elements.abs().sum_to_size(shape)


def solve(gates, tokens, state, options, weight, last_weight):
    """States, final states and gradients in float64, each with what its error is compared with."""
    dim, bounds = options["dim"] % tokens.dim(), options["cu_seqlens"]
    full_gates, start = wide(gates).expand(tokens.shape), None
    if state is not None:
        sequences = None if bounds is None else len(bounds) - 1
        start = wide(state).expand(reference.state_shape(tokens.shape, dim, sequences))
    states, last = reference.forward(full_gates, wide(tokens), start, **options)
    found = reference.backward(
        full_gates, states, wide(weight), start, wide(last_weight), **options
    )
    gates_grad, tokens_grad, state_grad = found
    solved = {
        "states": (states, states),
        "last": (last, last),
        "gates": sum_and_size(gates_grad, gates.shape),
        "tokens": (tokens_grad, tokens_grad),
    }
    if state is not None:
        solved["state"] = sum_and_size(state_grad, state.shape)
    return solved


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["time_last", "channel_last"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_options(setting, layout, dtype, backend):
    """Values and gradients, in every layout and dtype that there are kernels for."""
    if setting.mixed and dtype not in ("float16", "bfloat16"):
        pytest.skip("gates are of the same dtype")
    for sizes in SIZES:
        gates, tokens, state, options = problem(setting, sizes, layout, dtype)
        given = [t.requires_grad_() for t in (gates, tokens, state) if t is not None]
        states, last = scan_registry.linear_scan(
            gates, tokens, state, **options, return_final_state=True, backend=backend
        )
        weight, last_weight = (torch.randn_like(t) * setting.size() for t in (states, last))
        grads = torch.autograd.grad((states, last), given, (weight, last_weight))
        detached = [None if t is None else t.detach() for t in (gates, tokens, state)]
        solved = solve(*detached, options, weight, last_weight)
        outputs = dict(zip(solved, (states, last, *grads), strict=True))
        leaves = dict(zip(("gates", "tokens", "state"), given, strict=False))
        for name, (ref, size) in solved.items():
            out = outputs[name]
            assert out.shape == ref.shape
            assert name not in leaves or out.dtype == leaves[name].dtype
            error = float((wide(out.detach()) - ref).norm() / size.norm().clamp_min(1e-30))
            assert error <= TOLERANCE[dtype], (name, sizes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
def test_broadcast_gates_are_those_written_out(dim, backend):
    tokens = normal(3, 200, 160, dtype="float32")
    for shape in ((3, 1, 160), (200, 1), (1,), (3, 200, 1)):
        gates = gates_of(*shape, dtype="float32")
        scan = partial(scan_registry.linear_scan, dim=dim, backend=backend, reverse=True)
        written_out = scan(gates.expand(3, 200, 160).clone(), tokens)
        assert relative_error(scan(gates, tokens), written_out) <= TOLERANCE["float32"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 2])
def test_chunks_make_the_whole(dim, backend):
    """Their final states carry all that the next one needs, and the gradients all of the way back."""
    tensors = inputs(2, 256, 320)
    scan = partial(scan_registry.linear_scan, dim=dim, backend=backend, return_final_state=True)
    state, chunks = None, []
    for gates, tokens in zip(*(t.split(100, dim) for t in tensors), strict=True):
        states, state = scan(gates, tokens, state)
        chunks.append(states)
    whole, last = scan(*tensors)
    weights = torch.randn_like(whole), torch.randn_like(last)
    parts = torch.cat(chunks, dim), state
    grads = torch.autograd.grad((whole, last), tensors, weights)
    of_parts = torch.autograd.grad(parts, tensors, weights)
    for out, ref in zip((*parts, *of_parts), (whole, last, *grads), strict=True):
        assert relative_error(out, ref.detach()) <= TOLERANCE["float32"]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("of_gates", [(2, 64, 512), (64, 1)], ids=str)
def test_only_gradients_asked_for(of_gates, wanted):
    """The same bits as where all are."""
    tensors = [gates_of(*of_gates, dtype="float32"), normal(2, 64, 512, dtype="float32")]
    tensors.append(normal(2, 64, dtype="float32"))

    def grads(*numbers):
        leaves = [t.clone().requires_grad_(n in numbers) for n, t in enumerate(tensors)]
        scan_registry.linear_scan(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for number, (found, ref) in enumerate(zip(grads(*wanted), grads(0, 1, 2), strict=True)):
        assert found is None if number not in wanted else torch.equal(found, ref)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "dim", "of_gates"),
    [((1, 4000, 202), -1, (4000, 1)), ((3, 81, 2001), 1, (2001,)), ((2, 700, 1096), 1, (1, 1096))],
    ids=str,
)
def test_thousands_of_gates_that_steps_share(shape, dim, of_gates, dtype):
    """Each has few sums over time to add up."""
    gates = (gates_of(*of_gates, dtype=dtype) * 0.9).requires_grad_()
    tokens = normal(*shape, dtype=dtype).requires_grad_()
    states = scan_registry.linear_scan(gates, tokens, dim=dim)
    weight = torch.randn_like(states)
    states.backward(weight)
    full = gates.detach().expand(shape)
    _, gates_grad, tokens_grad = expected(full, tokens, weight, dim)
    for out, ref in ((gates.grad, gates_grad.sum_to_size(gates.shape)), (tokens.grad, tokens_grad)):
        assert relative_error(out, ref) <= TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"return_final_state": True}], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((0,), 0), ((2, 0), 1), ((0, 3), 1), ((2, 0, 4), 2)])
def test_empty_tensors(shape, dim, options):
    tensors = inputs(*shape)
    found = scan_registry.linear_scan(*tensors, dim=dim, **options)
    states, *last = found if isinstance(found, tuple) else (found,)
    assert states.shape == shape
    assert all(torch.equal(t, torch.zeros_like(t)) for t in last)
    states.sum().backward()
    assert [t.grad.shape for t in tensors] == [shape, shape]


# --- What is refused --------------------------------------------------------------------------


def test_bad_input():
    gates, tokens = inputs(2, 3, 4, grad=False)
    with pytest.raises(ValueError, match="gates is on cuda:0, tokens on cpu; they must be on one"):
        scan_registry.linear_scan(gates, tokens.cpu())
    with pytest.raises(ValueError, match="initial_state is on cpu, tokens on cuda:0"):
        scan_registry.linear_scan(gates, tokens, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="cu_seqlens is on cpu, tokens on cuda:0"):
        scan_registry.linear_scan(gates, tokens, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(TypeError, match="float64 does not mix with narrower dtypes"):
        scan_registry.linear_scan(gates, tokens.double())


def test_complex128_has_the_reference_alone():
    gates, tokens = inputs(2, 3, 4, dtype="complex128", grad=False)
    accepted = "accepted are float32, bfloat16, float16, float64, complex64$"
    with pytest.raises(TypeError, match=accepted):
        scan_registry.linear_scan(gates, tokens)
    found = scan_registry.linear_scan(gates, tokens, backend="reference")
    torch.testing.assert_close(found.cpu(), scan_registry.linear_scan(gates.cpu(), tokens.cpu()))


# --- Processes of their own -------------------------------------------------------------------


def run(script):
    done = captured([sys.executable, "-c", script], cwd="/")
    assert done.stdout.strip() == "True", done.stderr


def test_nothing_compiles():
    """The whole path works where neither triton nor NVRTC can be imported."""
    run("""
import sys
for name in ("triton", "cuda", "nvidia", "pynvrtc"):
    sys.modules[name] = None
import torch, scan_registry
gates = torch.rand(2, 64, 512, device="cuda", requires_grad=True)
decay = torch.rand(64, 1, device="cuda", requires_grad=True)
for backend in ("cuda", "triton"):
    scan_registry.linear_scan(gates, gates, backend=backend).sum().backward()
    scan_registry.linear_scan(decay, gates, backend=backend, reverse=True).sum().backward()
print(gates.grad.isfinite().all().item() and decay.grad.isfinite().all().item())
""")
