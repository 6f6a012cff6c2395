"""Layers of recurrent networks in one function to autograd, with kernels that are played on the CPU: against torch.nn, and
against the same layers composed of operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from covering import each_pair
from pretending import Runs, flat, pretend_gpu
from torch import Tensor

from scan_registry import nn
from scan_registry.dispatch import policy
from scan_registry.kernels.rnn.op import layer as rnn_layer
from scan_registry.kernels.rnn.op import plans as rnn_plans
from scan_registry.ops.call import fast_path

KINDS = ("LSTM", "GRU", "RNN", "SLSTM")
TIME, BATCH, FEATURES, HIDDEN = 5, 3, 6, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "layers": {"num_layers": 2, "batch_first": True},
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """The problems that were solved by kernels, which are played on the CPU; each run of one, too."""
    return pretend_gpu(monkeypatch)


def make(kind: str, **options: Any) -> Any:
    if kind == "SLSTM":
        options["num_heads"] = 2
    return getattr(nn, kind)(FEATURES, HIDDEN, **options)


def draw(module: Any, with_states: bool = False) -> tuple[Tensor, Any]:
    dtype = module.weight_hh_l0.dtype
    x = torch.randn(*((BATCH, TIME) if module.batch_first else (TIME, BATCH)), FEATURES).to(dtype)
    if not with_states:
        return x.requires_grad_(), None
    count = {"LSTM": 2, "SLSTM": 4}.get(type(module).__name__, 1)
    shape = module.num_layers, BATCH, HIDDEN
    states = tuple((torch.rand(shape) + 0.5).to(dtype).requires_grad_() for _ in range(count))
    return x.requires_grad_(), states if count > 1 else states[0]


def draw_marks(module: Any) -> Tensor:
    """Where states start anew: at one first step, too."""
    marks = torch.rand(BATCH, TIME) < 0.3
    marks[:, 0] = torch.arange(BATCH) == 1
    return marks if module.batch_first else marks.T.contiguous()


def leaves(module: Any, x: Tensor, hx: Any) -> list[Tensor]:
    wanted = [*module.parameters(), x, *([] if hx is None else flat(hx))]
    return [each for each in wanted if each.requires_grad]


def gradients(
    module: Any, x: Tensor, hx: Any, used: Any, **how: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """All results, and the gradients of the sum of those that ``used`` says, each weighted."""
    found = flat(module(x, hx, **how))
    weights = [torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype) for out in found]
    loss = sum(
        (out * w).sum() for k, (out, w) in enumerate(zip(found, weights, strict=True)) if used(k)
    )
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(
        loss, leaves(module, x, hx), allow_unused=True, materialize_grads=True
    )
    return found, [*grads]


def close(found: list[Tensor], expected: list[Tensor], slack: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=slack, atol=slack)


USED: dict[str, Callable[[int], bool]] = {
    "all": lambda k: True,
    "output": lambda k: k == 0,
    "states": lambda k: k > 0,
    "the last state": lambda k: k == 1,
}


@pytest.mark.parametrize(
    ("kind", "name", "with_states", "resets"),
    each_pair(KINDS, OPTIONS, (False, True), (False, True)),
)
def test_layers_are_those_composed(
    kind: str,
    name: str,
    with_states: bool,
    resets: bool,
    solved: Runs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = make(kind, **OPTIONS[name])
    given = draw(module, with_states)
    how = {"reset": draw_marks(module)} if resets else {}
    found = {each: gradients(module, *given, used, **how) for each, used in USED.items()}
    with torch.no_grad():
        close(flat(module(*given, **how)), found["all"][0])
    assert len(solved) == module.num_layers * (2 * len(USED) + 1)
    assert all(p.resets == resets for p, _ in solved)
    assert {p.graded for p, _ in solved if p.direction == "backward"} == {0, 1}
    monkeypatch.setattr("scan_registry.nn.recurrent.on_gpu", lambda tensor: False)
    for each, used in USED.items():
        expected = gradients(module, *given, used, **how)
        close(found[each][0], expected[0])
        for one, other in zip(found[each][1], expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if kind != "SLSTM" and not resets:
        theirs = getattr(torch.nn, kind)(FEATURES, HIDDEN, **OPTIONS[name])
        theirs.load_state_dict(module.state_dict())
        close(found["all"][0], gradients(theirs, *given, USED["all"])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_dtypes(kind: str, solved: Runs) -> None:
    module = make(kind).bfloat16()
    x, hx = draw(module, True)
    exact = copy.deepcopy(module).float()
    wide = (
        x.detach().float().requires_grad_(),
        torch.utils._pytree.tree_map(lambda t: t.detach().float().requires_grad_(), hx),
    )
    found, expected = gradients(module, x, hx, USED["all"]), gradients(exact, *wide, USED["all"])
    for one, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert one.dtype == torch.bfloat16
        assert float(((one.float() - other).norm() / other.norm()).detach()) < 2e-2
    assert {p.dtype for p, _ in solved} == {"bfloat16", "float32"}


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_few_steps_and_rows(
    kind: str, shape: tuple[int, int], solved: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(kind)
    x = torch.randn(*shape, FEATURES, requires_grad=True)
    ways: tuple[dict[str, Any], ...] = {}, {"reset": torch.rand(shape) < 0.5}
    found = [gradients(module, x, None, USED["all"], **how) for how in ways]
    assert len(solved) == 4
    monkeypatch.setattr("scan_registry.nn.recurrent.on_gpu", lambda tensor: False)
    for one, how in zip(found, ways, strict=True):
        expected = gradients(module, x, None, USED["all"], **how)
        close(one[0] + one[1], expected[0] + expected[1], 1e-4)


def test_gradients_that_are_not_wanted(solved: Runs) -> None:
    for kind, seen in product(KINDS, range(6)):
        module = make(kind)
        x, hx = draw(module, True)
        every = gradients(module, x, hx, USED["all"])[1]
        own = leaves(module, x, hx)
        own[seen].requires_grad_(False)
        fewer = gradients(module, x, hx, USED["all"])[1]
        close(fewer, [grad for k, grad in enumerate(every) if k != seen])


@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_is_shared(kind: str, solved: Runs) -> None:
    """Results and gradients may be changed in place, but for what a backward pass needs."""
    module = make(kind)
    x, hx = draw(module, True)
    results = flat(module(x, hx))
    before = [each.detach().clone() for each in results]
    for k, result in enumerate(results):
        with torch.no_grad():
            result.add_(1)
        for other in range(k + 1, len(results)):
            assert torch.equal(results[other], before[other])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()
    results = flat(module(x, hx))
    results[0].mul_(2)
    grads = gradients(module, x, hx, USED["all"])[1]
    known = [grad.clone() for grad in grads]
    for k, grad in enumerate(grads):
        grad.zero_()
        for other in range(k + 1, len(grads)):
            assert torch.equal(grads[other], known[other])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_before_a_reset_counts_for_nothing(kind: str, solved: Runs) -> None:
    """Even if it is NaN: in a step before, and in the states that a first reset hides, which get no gradient."""
    module = make(kind)
    x, hx = draw(module, True)
    marks = torch.zeros(TIME, BATCH, dtype=torch.bool)
    marks[2] = True
    broken = x.detach().clone()
    broken[1] = torch.nan
    assert torch.equal(module(broken, hx, reset=marks)[0][2:], module(x[2:])[0])
    expected = gradients(module, x, None, USED["all"])
    with torch.no_grad():
        for state in flat(hx):
            state.fill_(torch.nan)
    found = gradients(module, x, hx, USED["all"], reset=marks.roll(-2, 0))
    count = len(expected[1])
    close(found[0] + found[1][:count], expected[0] + expected[1], 1e-4)
    assert not any(grad.any() for grad in found[1][count:])
    assert sum(p.resets for p, _ in solved) == 3


def test_marks_as_they_may_lie(solved: Runs) -> None:
    """Strided, unbatched, and written to afterwards."""
    module = make("GRU")
    x, _ = draw(module)
    marks = draw_marks(module)
    expected = gradients(module, x, None, USED["all"], reset=marks)
    spread = torch.zeros(TIME, BATCH, 2, dtype=torch.bool)
    spread[..., 0] = marks
    out = module(x, reset=spread[..., 0])[0]
    spread.fill_(True)
    out.sum().backward()
    assert torch.equal(out, expected[0][0])
    one = module(x[:, 0], reset=marks[:, 0])[0]
    torch.testing.assert_close(one, expected[0][0][:, 0])
    assert len(solved) == 5
    assert all(p.resets for p, _ in solved)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(
    kind: str, resets: bool, solved: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(kind)
    how = {"reset": draw_marks(module)} if resets else {}

    def second() -> list[Tensor]:
        torch.manual_seed(1)
        x, hx = draw(module, True)
        wanted = leaves(module, x, hx)
        found = flat(module(x, hx, **how))
        first = torch.autograd.grad(
            sum(out.sin().sum() for out in found), wanted, create_graph=True
        )
        loss = sum(grad.square().sum() for grad in first)
        assert isinstance(loss, Tensor)
        return [*torch.autograd.grad(loss, wanted)]

    found = second()
    assert any(p.direction == "forward" for p, _ in solved)
    monkeypatch.setattr("scan_registry.nn.recurrent.on_gpu", lambda tensor: False)
    for one, other in zip(found, second(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_weights_that_change_are_seen(solved: Runs) -> None:
    """Whatever writes to them, with or without a version: nothing of a weight is kept."""
    for kind in KINDS:
        module = make(kind)
        x, _ = draw(module)
        with torch.no_grad():
            module(x)
            for name, weight in module.named_parameters():
                weight.data.mul_(1.5)
                assert torch.equal(module(x)[0], copy.deepcopy(module)(x)[0]), name
                weight.numpy()[:] *= 0.5
                assert torch.equal(module(x)[0], copy.deepcopy(module)(x)[0]), name


def test_hooks_of_saved_tensors(solved: Runs) -> None:
    """Tensors that come back another way are computed with as they are."""
    for kind in KINDS:
        module = make(kind)
        given = draw(module, True)
        how = {"reset": draw_marks(module)}
        expected = gradients(module, *given, USED["all"], **how)
        for unpack in (
            lambda t: t.clone(),
            lambda t: t.clone() if t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                found = gradients(module, *given, USED["all"], **how)
            for one, other in zip(found[1], expected[1], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_required_backwards_is_what_was_forwards(solved: Runs, monkeypatch: Any) -> None:
    requests: list[Any] = []
    prepare = rnn_plans.prepare_sequence

    def noted(*how: Any) -> Any:
        requests.append((how[0], policy.required.get()))
        return prepare(*how)

    monkeypatch.setattr(rnn_plans, "prepare_sequence", noted)
    module = make("LSTM")
    x, _ = draw(module)
    tier = policy.Tier.PTX
    with policy.as_required(tier):
        out = module(x)[0]
    out.sum().backward()
    assert requests == [("forward", tier), ("backward", tier)]


def randn(*sizes: int) -> Tensor:
    return torch.randn(sizes or (TIME, BATCH, FEATURES))


def marked(module: Any, **how: Any) -> Any:
    return module(randn(), reset=draw_marks(module), **how)


def mapped_resets() -> Any:
    module, x = make("GRU"), randn()
    marks = torch.stack([draw_marks(module) for _ in range(2)])
    return torch.func.vmap(lambda reset: module(x, reset=reset))(marks)


LEFT_TO_OTHERS: dict[str, Callable[[], Any]] = {
    "padded": lambda: nn.LSTM(FEATURES, 20)(randn()),
    "both ways": lambda: make("LSTM", bidirectional=True)(randn()),
    "wide": lambda: make("LSTM").double()(randn().double()),
    "no rows": lambda: make("GRU")(randn(TIME, 0, FEATURES)),
    "no steps": lambda: make("GRU")(randn(0, BATCH, FEATURES)),
    "reference": lambda: make("RNN", backend="reference")(randn()),
    "misaligned": lambda: make("RNN")(
        randn(TIME * BATCH * FEATURES + 1)[1:].view(TIME, BATCH, FEATURES)
    ),
    "mapped": lambda: torch.func.vmap(make("GRU"))(randn(2, TIME, BATCH, FEATURES)),
    "packed": lambda: make("LSTM")(
        torch.nn.utils.rnn.pack_sequence([randn(3, FEATURES), randn(1, FEATURES)])
    ),
    "strided states": lambda: make("LSTM")(
        randn(), tuple(randn(1, HIDDEN, BATCH).transpose(1, 2) for _ in range(2))
    ),
    "both ways with resets": lambda: marked(make("GRU", bidirectional=True)),
    "states at resets": lambda: marked(make("RNN"), reset_hx=randn(1, BATCH, HIDDEN)),
    "mapped resets": mapped_resets,
}


@pytest.mark.parametrize("name", LEFT_TO_OTHERS)
def test_what_is_left_to_others(name: str, solved: Runs) -> None:
    LEFT_TO_OTHERS[name]()
    assert not solved


def test_no_kernel(solved: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none takes all steps the layer is composed, and where none goes backwards its gradient is."""
    module = make("LSTM")
    x, hx = draw(module, True)
    how = {"reset": draw_marks(module)}
    expected = gradients(module, x, hx, USED["all"], **how)
    prepare, missing = rnn_plans.prepare_sequence, ""

    def some(direction: Any, *how: Any) -> Any:
        return None if direction == missing else prepare(direction, *how)

    monkeypatch.setattr(rnn_plans, "prepare_sequence", some)
    for missing in ("forward", "backward"):  # noqa: B007
        monkeypatch.setattr(rnn_layer, "_fast", fast_path(rnn_layer._plan_call))
        found = gradients(module, x, hx, USED["all"], **how)
        for one, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_gradients(kind: str, resets: bool, solved: Runs) -> None:
    """As Jacobians are taken: by torch's own batches, and by ``torch.func.vmap`` over a backward pass."""
    module = make(kind)
    x, hx = draw(module, True)
    wanted = leaves(module, x, hx)
    out = flat(module(x, hx, reset=draw_marks(module) if resets else None))[0]
    vectors = torch.randn(3, *out.shape)
    expected = [
        torch.autograd.grad(out, wanted, v, retain_graph=True, allow_unused=True) for v in vectors
    ]
    how: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    legacy = torch.autograd.grad(out, wanted, vectors, is_grads_batched=True, **how)
    mapped = torch.func.vmap(lambda v: torch.autograd.grad(out, wanted, v, **how))(vectors)
    for found in (legacy, mapped):
        for k, grad in enumerate(found):
            for row in range(3):
                torch.testing.assert_close(grad[row], expected[row][k], rtol=1e-4, atol=1e-4)
