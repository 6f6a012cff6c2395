"""Bad values in tensors: every public operator and module refuses them on the CPU, and on a GPU under SCAN_REGISTRY_DEBUG.

The table has the arguments whose values, or dtype, have an accepted range. A public operator with an argument of such a name that
has no line in the table fails a test.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence

import scan_registry
from scan_registry import distributed, nn
from scan_registry.compat import causal_conv1d as of_convolutions
from scan_registry.compat.mamba_ssm.ops import selective_scan_interface as of_scans
from scan_registry.compat.mamba_ssm.ops.triton import selective_state_update as of_steps

B, D, T, N = 2, 3, 6, 4
ROWS = 5

#: By argument: bad values, each with the words of its error.
BOUNDS = [
    ([0, 7], "cu_seqlens (runs from 0 to 7|ends with 7)"),
    ([1, 6], "cu_seqlens (runs from 1 to 6|begins with 1)"),
    ([0, 5, 3, 6], "cu_seqlens falls"),
    ([0, -1, 6], "cu_seqlens falls"),
]
INDICES = [
    ([0, ROWS], f"has the number {ROWS}, and the state {ROWS} rows; accepted are 0 to 4"),
    ([2**31 - 1, 0], "has the number 2147483647, and the state 5 rows; accepted are 0 to 4"),
    ([3, 3], "has the number 3 more than once; accepted are 0 to 4"),
]
LOWER = [
    ([0.0, 2.0, 0.5], "lower_bound has the value 2.0; accepted are values from 0 to 1"),
    ([0.0, float("nan"), 0.5], "lower_bound has the value nan; accepted are values from 0 to 1"),
    ([0.0, 0.5, -0.25], "lower_bound has the value -0.25; accepted are values from 0 to 1"),
]
BAD: dict[str, list[tuple[Any, str]]] = {
    "cu_seqlens": BOUNDS,
    "seq_idx": [([[0] * 5 + [2**31]] * B, "seq_idx has the number 2147483648; accepted are those")],
    "cache_seqlens": [
        ([3, -1], "cache_seqlens has the value -1; accepted are values from 0 to 2147483647"),
        ([2**31, 0], "cache_seqlens has the value 2147483648; accepted are values from 0 to 2147483647"),
    ],
    "conv_state_indices": INDICES,
    "state_batch_indices": INDICES,
    "lower_bound": LOWER,
    "max_seqlen": [(2, "max_seqlen is 2, and the longest sequence in cu_seqlens has 4 steps")],
}  # fmt: skip
#: These have no range of values, but a dtype; the check of it reads no values.
MARKS = ("reset",)


def sequences(*names: str, shape: tuple[int, ...] = (1, D, T), **others: Any) -> dict[str, Any]:
    return {name: torch.rand(shape) for name in names} | others


def scan_arguments() -> dict[str, Any]:
    inputs = sequences("u", "delta") | sequences("B", "C", shape=(1, N, T))
    return inputs | {"A": -torch.rand(D, N)}


def dual_arguments() -> dict[str, Any]:
    """Of ``ssd_scan``, with one head of three numbers."""
    given = sequences("x", shape=(B, T, 1, D)) | sequences("B", "C", shape=(B, T, 1, N))
    return given | {"dt": torch.rand(B, T, 1), "A": -torch.ones(1)}


def step_arguments() -> dict[str, Any]:
    inputs = sequences("x", "dt", shape=(B, D)) | sequences("B", "C", shape=(B, N))
    return inputs | {"A": -torch.rand(D, N), "state": torch.rand(ROWS, D, N)}


def module(
    created: Any, method: str = "forward", features: int = 4
) -> tuple[Callable[..., Any], Any]:
    shape = (B, features) if method == "step" else (1, T, features)
    return getattr(created, method), {"x": torch.rand(shape)}


def gated(operator: Any) -> Callable[..., Any]:
    return lambda *, x, forget, lower_bound=None, **more: operator(
        "hgrn", x, forget, torch.zeros_like(x[0, :, 0]) if lower_bound is None else lower_bound, **more
    )  # fmt: skip


def drafted(*, cu_seqlens: Any, **more: Any) -> Tensor:
    """The step of several inputs a sequence, with a slot for each sequence."""
    slots = torch.arange(len(cu_seqlens) - 1, device=more["x"].device)
    return scan_registry.causal_conv1d_update(
        **more, cu_seqlens=cu_seqlens, conv_state_indices=slots
    )


def operators() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """All, with good arguments."""
    shared = torch.rand(D, 4)
    convolution = sequences("x", weight=shared)
    update = {"x": torch.rand(B, D), "conv_state": torch.rand(ROWS, D, 3), "weight": shared}
    ring = update | {"conv_state": torch.rand(B, D, 3)}
    batch = sequences("x", shape=(B, D, T), weight=shared)
    two = sequences("gates", "tokens")
    hgrn, here = sequences("x", "forget"), scan_registry
    rnn = {"Wx": torch.rand(1, T, 4, 1, N), "R": torch.rand(4, 1, N, N), "b": None}
    return {
        "causal_conv1d": (here.causal_conv1d, convolution),
        "causal_conv1d seq_idx": (here.causal_conv1d, batch),
        "causal_conv1d_update": (here.causal_conv1d_update, update),
        "causal_conv1d_update cache_seqlens": (here.causal_conv1d_update, ring),
        "causal_conv1d_update cu_seqlens": (drafted, update | {"x": torch.rand(T, D)}),
        "gated_scan": (gated(here.gated_scan), hgrn),
        "hgrn": (here.hgrn, hgrn),
        "linear_scan": (here.linear_scan, two),
        "min_gru": (here.min_gru, sequences("gate", "hidden")),
        "min_lstm": (here.min_lstm, sequences("forget", "input", "hidden")),
        "rg_lru": (
            here.rg_lru,
            sequences("x", "recurrence_gate", "input_gate", a_param=torch.rand(D)),
        ),
        "rnn": (here.rnn, rnn),
        "rnn max_seqlen": (here.rnn, rnn | {"cu_seqlens": torch.tensor([0, 4, 6])}),
        "selective_scan": (here.selective_scan, scan_arguments()),
        "selective_state_update": (here.selective_state_update, step_arguments()),
        "ssd_scan": (here.ssd_scan, dual_arguments()),
        "distributed.causal_conv1d": (distributed.causal_conv1d, convolution),
        "distributed.causal_conv1d seq_idx": (distributed.causal_conv1d, batch),
        "distributed.gated_scan": (gated(distributed.gated_scan), hgrn),
        "distributed.linear_scan": (distributed.linear_scan, two),
        "distributed.selective_scan": (distributed.selective_scan, scan_arguments()),
        "distributed.ssd_scan": (distributed.ssd_scan, dual_arguments()),
        "compat.causal_conv1d_fn": (of_convolutions.causal_conv1d_fn, batch),
        "compat.causal_conv1d_update": (of_convolutions.causal_conv1d_update, update),
        "compat.causal_conv1d_update cache_seqlens": (of_convolutions.causal_conv1d_update, ring),
        "compat.causal_conv1d_varlen_states": (
            of_convolutions.causal_conv1d_varlen_states,
            {"x": torch.rand(T, D), "state_len": 3},
        ),
        "compat.selective_state_update": (of_steps.selective_state_update, step_arguments()),
        "nn.HGRN": module(nn.HGRN(3), features=3),
        "nn.HGRN.step": module(nn.HGRN(3), "step", features=3),
        "nn.LRU": module(nn.LRU(4, 4)),
        "nn.Mamba2": (nn.Mamba2(4, 4, headdim=4).forward, {"u": torch.rand(1, T, 4)}),
        "nn.Mamba2 seq_idx": (nn.Mamba2(4, 4, headdim=4).forward, {"u": torch.rand(B, T, 4)}),
        "nn.MinGRU": module(nn.MinGRU(4)),
        "nn.MinLSTM": module(nn.MinLSTM(4)),
        "nn.RGLRU": module(nn.RGLRU(4, 2)),
        "nn.S5": module(nn.S5(4, 4)),
    }


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def arguments_of(name: str, function: Any) -> list[str]:
    """The arguments of the table that a public function has."""
    taken = [parameter for parameter in inspect.signature(function).parameters if parameter in BAD]
    return ["lower_bound", *taken] if name.endswith("gated_scan") else taken


def public() -> dict[str, Any]:
    result: dict[str, Any] = {}
    homes = {"": scan_registry, "distributed.": distributed, "nn.": nn}
    homes |= {"compat.": of_convolutions, "compat. ": of_scans, "compat.  ": of_steps}
    for prefix, home in homes.items():
        for name in getattr(home, "__all__", ["selective_state_update"]):
            what = getattr(home, name)
            if inspect.isfunction(what):
                result[prefix.strip() + name] = what
            elif inspect.isclass(what) and issubclass(what, torch.nn.Module):
                result[prefix + name] = what.forward
                result[prefix + name + ".step"] = getattr(what, "step", what.forward)
    return result


EVERY = [(name, item) for name, function in public().items() for item in arguments_of(name, function)]  # fmt: skip


def case(name: str, argument: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    result = operators()
    return result.get(f"{name} {argument}") or result[name]


def as_argument(bad: Any, device: str) -> Any:
    return bad if isinstance(bad, int) else torch.tensor(bad, device=device)


def on(device: str, function: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    owner = getattr(function, "__self__", None)
    if owner is not None:
        owner.to(device)
    return function, {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


@pytest.mark.parametrize(("name", "argument"), EVERY, ids=lambda item: item)
def test_bad_values_are_refused_on_the_cpu(name: str, argument: str) -> None:
    function, inputs = case(name, argument)
    refuses(function, inputs, argument, "cpu", name == "compat.causal_conv1d_varlen_states")


def refuses(
    function: Any, arguments: dict[str, Any], argument: str, device: str, part: bool
) -> None:
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, Tensor)}
    for bad, words in BAD[argument]:
        if part and bad == [1, 6]:
            continue  # sequences need not cover all steps there
        with torch.no_grad(), pytest.raises(ValueError, match=words) as caught:
            function(**arguments, **{argument: as_argument(bad, device)})
        assert argument in str(caught.value)
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "argument"),
    [item for item in EVERY if "distributed" not in item[0]],
    ids=lambda item: item,
)
def test_bad_values_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, argument: str) -> None:
    """Not read by default, nor after a call with checks, and checked under SCAN_REGISTRY_DEBUG after a call without."""
    function, arguments = on("cuda", *case(name, argument))
    for value in ("0", "1", "0", "1"):
        monkeypatch.setenv("SCAN_REGISTRY_DEBUG", value)
        if value == "1":
            refuses(function, arguments, argument, "cuda", name.endswith("varlen_states"))
            continue
        reads = argument == "cu_seqlens" and name == "rnn"  # its sequences become rows of a batch
        for bad, _ in [] if reads else BAD[argument]:
            with torch.no_grad():
                function(**arguments, **{argument: as_argument(bad, "cuda")})
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "name",
    [name for name, of in public().items() if {*MARKS} & {*inspect.signature(of).parameters}
     and name in operators()],
)  # fmt: skip
def test_resets_are_booleans(name: str) -> None:
    function, arguments = case(name, "reset")
    shape = (B,) if name.endswith("step") else (1, T)
    with pytest.raises(TypeError, match=r"reset .*dtype"):
        function(**arguments, reset=torch.zeros(shape))


@pytest.mark.parametrize(
    ("name", "argument"), [pair for pair in EVERY if pair[1] != "max_seqlen"], ids=lambda word: word
)
def test_what_has_no_values_is_named(name: str, argument: str) -> None:
    """Checks of values leave it to those that say what is wrong with it."""
    function, arguments = case(name, argument)
    good = torch.zeros(2 if argument != "lower_bound" else D)
    for bad in (good.to_sparse(), good * 1j, good.to("meta"), good.tolist(), good.view(1, 1, -1)):
        with pytest.raises((TypeError, ValueError), match=f"{argument} "):
            function(**arguments, **{argument: bad})


@pytest.mark.parametrize("kind", [nn.MinGRU, nn.MinLSTM])
@pytest.mark.parametrize("option", ["return_final_state", "return_next_prev_hidden"])
def test_options_of_modules_are_booleans(kind: Any, option: str) -> None:
    for bad in (1, None, "yes"):
        with pytest.raises(TypeError, match=f"{option} is {bad!r}; it must be a bool"):
            kind(4)(torch.rand(1, T, 4), **{option: bad})


@pytest.mark.parametrize("bound", [[0.0, 1.0, 0.5], [-1e-7, 1.0000002, 0.5]])
@pytest.mark.parametrize("kind", [Tensor, torch.nn.Parameter])
def test_lower_bounds_in_the_range_and_rounded(bound: list[float], kind: Any) -> None:
    """Sums of a softmax's parts, as HGRN's lower bounds are, may be one by rounding."""
    x = torch.rand(1, D, T)
    lower = torch.tensor(bound)
    assert scan_registry.hgrn(x, x, lower if kind is Tensor else kind(lower)).isfinite().all()


PACKINGS = [
    (([3, 2], None, None), r"batch_sizes .* sum is input.data.size\(0\), 4, got \[3, 2\]"),
    (([2, 1], None, None), r"batch_sizes .* got \[2, 1\]"),
    (([1, 3], None, None), r"batch_sizes .* got \[1, 3\]"),
    (([4, 0], None, None), r"batch_sizes .* got \[4, 0\]"),
    (([5, -1], None, None), r"batch_sizes .* got \[5, -1\]"),
    (([3, 1], [0, 1, 3], [0, 1, 2]), r"sorted_indices .* 3 sequences, .* got \[0, 1, 3\]"),
    (([3, 1], [1, 2, 0], [1, 2, 0]), r"sorted_indices .* inverse"),
    (([3, 1], [0, 1], [0, 1]), r"sorted_indices .* 3 sequences"),
    (([3, 1], None, [0, 0, 1]), r"sorted_indices .* 3 sequences"),
]


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "SLSTM"])
def test_packed_sequences_that_torch_does_not_make(kind: str) -> None:
    created = getattr(nn, kind)(3, 8)
    for numbers, words in PACKINGS:
        sizes, inputs, own = (
            None if number is None else torch.tensor(number) for number in numbers
        )
        with pytest.raises(RuntimeError, match=f"{kind}: Expected input.{words}"):
            created(PackedSequence(torch.rand(4, 3), sizes, inputs, own))


def test_checks_enter_no_graph() -> None:
    """Values that are traced, compiled or mapped over are not read."""
    x = torch.rand(2, D, T)
    lower, bounds = torch.tensor([0.0, 0.25, 0.5]), torch.tensor([0, 2, T])

    def scan(x: Tensor, lower: Tensor, bounds: Tensor) -> Tensor:
        actual: Tensor = scan_registry.hgrn(x, x, lower, cu_seqlens=bounds)
        return actual

    expected = scan(x, lower, bounds)
    compiled = torch.compile(scan, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, lower, bounds), expected)
    created = make_fx(scan, tracing_mode="real")(x, lower, bounds)
    assert torch.equal(created(x, lower, bounds), expected)
    assert "aminmax" not in created.code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(scan, (x, lower, bounds), check_trace=False)
    assert "aminmax" not in str(traced.graph)
    mapped = torch.vmap(scan_registry.hgrn, in_dims=(None, None, 0))
    both = torch.stack([lower, lower + 0.25])
    expected = torch.stack([scan_registry.hgrn(x, x, item) for item in both])
    torch.testing.assert_close(mapped(x, x, both), expected)
    step = {**step_arguments(), "state_batch_indices": torch.tensor([4, -1])}
    state = step["state"].clone()
    actual = torch.compile(scan_registry.selective_state_update, backend="eager", fullgraph=True)(
        **step
    )
    assert torch.equal(actual, scan_registry.selective_state_update(**{**step, "state": state}))
    with pytest.raises(
        ValueError, match=r"lower_bound has the value 2\.0"
    ):  # of a derivative's tensor
        torch.func.grad(lambda bound: scan(x, bound, bounds).sum())(torch.tensor([0.0, 0.5, 2.0]))
