"""``examples/model_steps.py``: each way to run a step computes what the model does, of ``scan_registry.nn`` and of transformers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from by_path import EXAMPLES, load
from torch import Tensor
from torch._dynamo.utils import counters

steps: Any = load(EXAMPLES / "model_steps.py")
SIZE = 32, 2, 50  # features, layers, vocabulary
NEW = 6
STEPS = 3
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EVERY = pytest.mark.parametrize("kind", ["nn", "transformers"])
BOTH = pytest.mark.parametrize("name", steps.BLOCKS)
WAYS = pytest.mark.parametrize("way", [steps.COMPILED, steps.GRAPH])

pytestmark = pytest.mark.usefixtures("one_thread", "_nothing_compiled")


@pytest.fixture
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a model with the same weights each time; those of transformers call the stand-ins."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    examples: list[Any] = []

    def make(kind: str, name: str, device: str) -> Any:
        torch.manual_seed(0)
        if kind == "nn":
            return steps.LanguageModel(name, SIZE).to(device)
        if importlib.util.find_spec("transformers") is None:
            pytest.skip("transformers is not installed")
        if not examples:
            examples.append(load(EXAMPLES / "transformers_models.py"))
            examples.extend(examples[0].modules(name, [examples[0].OURS]).values())
        return examples[0].build(name, examples[1], SIZE).to(device)

    yield make
    for name in steps.BLOCKS:
        sys.modules.pop(f"transformers.models.{name}.modeling_{name}", None)


def tokens(device: str, batch: int, time: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, SIZE[2], (batch, time), generator=generator).to(device)


def results(run: Any, way: str, count: int, result: Callable[[Any], Any]) -> list[Any]:
    """Those of steps behind the ones that are taken while a graph is recorded."""
    if way != steps.GRAPH:
        for _ in range(steps.WARM_UPS):
            run.step()
    every = []
    for _ in range(count):
        run.run()
        every.append(result(run))
    return every


def trained(model: Any, ids: Tensor, way: str) -> list[float]:
    """The losses."""
    training = steps.Training(model.train(), ids, way)
    return results(training, way, STEPS, lambda run: float(run.loss))


def generated(model: Any, prompt: Tensor, way: str) -> list[Any]:
    """Tokens."""
    generation = steps.Generation(model.eval(), prompt, way)
    return results(generation, way, NEW, lambda run: run.token.tolist())


@EVERY
@BOTH
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_step_from_states_is_the_whole_sequence(
    build: Any, kind: str, name: str, device: str
) -> None:
    model, prompt = build(kind, name, device).eval(), tokens(device, 2)
    generation = steps.Generation(model, prompt, steps.EAGER)
    ids = prompt
    for _ in range(NEW):
        ids = torch.cat([ids, generation.token], 1)
        generation.run()
        with torch.no_grad():
            expected = model(ids).logits[:, -1:].argmax(-1)
        assert torch.equal(generation.token, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*way, marks=[] if way == ("transformers", "mamba2") else pytest.mark.thorough)
        for way in product(["nn", "transformers"], steps.BLOCKS)
    ],
)
def test_dynamo_traces_whole_steps(build: Any, kind: str, name: str) -> None:
    """In one graph, which computes what the model does."""
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    ids = tokens("cpu", 2)
    losses, models = [], [build(kind, name, "cpu").train() for _ in range(2)]
    for call in (models[0], whole(models[1])):
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    for one, other in zip(*[model.parameters() for model in models], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    made = []
    for compiled in (False, True):
        generation = steps.Generation(models[0].eval(), ids, steps.EAGER)
        generation.call = whole(generation.call) if compiled else generation.call
        for _ in range(NEW):
            generation.run()
        made.append(generation.token)
    assert torch.equal(*made)


@pytest.mark.gpu
@WAYS
@EVERY
@BOTH
def test_a_training_step_in_each_way(build: Any, kind: str, name: str, way: str) -> None:
    ids = tokens("cuda", 2)
    expected = trained(build(kind, name, "cuda"), ids, steps.EAGER)
    assert expected[0] > expected[-1]
    assert trained(build(kind, name, "cuda"), ids, way) == pytest.approx(expected, rel=1e-4)
    # What a model of transformers does beside the stand-ins is its own affair.
    assert kind == "transformers" or not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@WAYS
@EVERY
@BOTH
def test_generation_in_each_way(build: Any, kind: str, name: str, way: str) -> None:
    model, prompt = build(kind, name, "cuda"), tokens("cuda", 3)
    expected = generated(model, prompt, steps.EAGER)
    assert generated(model, prompt, way) == expected
    assert kind == "transformers" or not counters["inductor"]["cudagraph_skips"]
