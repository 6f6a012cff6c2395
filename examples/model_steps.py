"""Ways to run a model's step: call after call, under ``torch.compile(mode="reduce-overhead")``, and as one CUDA graph.

``transformers_models.py --graphs`` times them. A step of a small model is a few hundred launches, which the CPU takes longer to make
than the GPU to run. A CUDA graph is recorded once, and one launch runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from scan_registry import nn

WAYS = EAGER, COMPILED, GRAPH = "eager", "compiled", "graph"
#: The block that a model of transformers has, as a module of scan_registry.
BLOCKS: Mapping[str, type[nn.Mamba] | type[nn.Mamba2]] = {"mamba": nn.Mamba, "mamba2": nn.Mamba2}
WARM_UPS = 3
#: Of the blocks whose time on the CPU is measured, and of their input, which is so small that the GPU waits for the CPU.
BLOCK_COUNT, BLOCK_SHAPE = 8, (1, 64)


class Output(NamedTuple):
    """Of a call of ``LanguageModel``: the loss, or without labels the logits."""

    loss: Tensor | None
    logits: Tensor | None


class Layer(torch.nn.Module):
    """A norm, a block and a residual connection."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width, eps=1e-5)
        self.block = BLOCKS[name](width)

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor] | None) -> Tensor:
        return x + self.block(self.norm(x), states=states)


class LanguageModel(torch.nn.Module):
    """The model of transformers of that name, of ``scan_registry.nn``: called in the same way, and with states in place of a cache."""

    def __init__(self, name: str, size: tuple[int, int, int]) -> None:
        super().__init__()
        width, layers, vocabulary = size
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(Layer(name, width) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width, eps=1e-5)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        torch.nn.init.normal_(self.embedding.weight, std=0.02)

    def new_states(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        """Of sequences that have not begun."""
        blocks: Any = [layer.block for layer in self.layers]
        return [block.allocate_inference_cache(batch, 0) for block in blocks]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache_params: list[tuple[Tensor, Tensor]] | None = None,
        use_cache: bool = False,
    ) -> Output:
        x = self.embedding(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if cache_params is None else cache_params[number])
        logits = self.head(self.norm(x)).float()
        if labels is None:
            return Output(None, logits)
        # As transformers does: no part of the logits is copied, and the last one has no label.
        targets = pad(labels[:, 1:], (0, 1), value=-100)
        return Output(cross_entropy(logits.flatten(0, 1), targets.flatten()), None)


def recorded(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a step. It runs a few times before, on a stream of its own, as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


class Training:
    """Training steps of a model in each way, on one batch ``ids``."""

    def __init__(self, model: Any, ids: Tensor, way: str) -> None:
        self.ids, self.loss = ids, torch.zeros((), device=ids.device)
        self.call = torch.compile(model, mode="reduce-overhead") if way == COMPILED else model
        # One launch updates all parameters, and the number of steps is on the GPU, where a graph counts it up.
        gpu = ids.is_cuda
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=gpu or None, capturable=gpu
        )
        self.run: Callable[[], object] = self.step
        if way == GRAPH:
            self.run = recorded(self.step).replay

    def step(self) -> None:
        """Forward, backward and the optimizer's update."""
        # Without gradients, which the backward pass then writes, and does not add to.
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.call(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())


class Generation:
    """Generates token after token, each the most likely one, behind a prompt (batch, time)."""

    @torch.no_grad()
    def __init__(self, model: Any, prompt: Tensor, way: str) -> None:
        self.call = model
        if isinstance(model, LanguageModel):
            self.cache: Any = model.new_states(len(prompt))
            for state in (state for states in self.cache for state in states):
                # A graph of torch.compile writes states where they are, as it writes those of transformers' cache.
                torch._dynamo.mark_static_address(state)
            out = model(prompt, cache_params=self.cache)
        else:
            out = model(prompt, use_cache=True)
            self.cache = out.cache_params
        self.token = out.logits[:, -1:].argmax(-1)
        if way == COMPILED:
            self.call = torch.compile(model, mode="reduce-overhead")
        self.run: Callable[[], object] = self.step
        if way == GRAPH:
            self.run = recorded(self.step).replay

    @torch.no_grad()
    def step(self) -> None:
        """The next token, in the place of the last one; the states are changed in place, too."""
        out = self.call(self.token, cache_params=self.cache, use_cache=True)
        self.token.copy_(out.logits[:, -1:].argmax(-1))


class Blocks:
    """Forward and backward passes of a few blocks, one behind the other."""

    def __init__(self, name: str, width: int, device: str, dtype: torch.dtype) -> None:
        blocks = [BLOCKS[name](width) for _ in range(BLOCK_COUNT)]
        self.blocks = torch.nn.Sequential(*blocks).to(device, dtype)
        self.x = torch.randn(*BLOCK_SHAPE, width, device=device, dtype=dtype, requires_grad=True)
        self.y_grad = torch.randn_like(self.x)

    def run(self) -> None:
        """Both passes."""
        self.blocks.zero_grad(set_to_none=True)
        self.x.grad = None
        self.blocks(self.x).backward(self.y_grad)


class Step(NamedTuple):
    """What is timed, on which path, a function that makes what runs it, and how many of it one run takes."""

    what: str
    path: str
    make: Callable[[], Callable[[], object]]
    count: int = 1


def steps(
    name: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    ids: Tensor,
    own: Callable[[], Any],
    ways: Iterable[str],
) -> Iterator[Step]:
    """Steps of a model of transformers, which ``own`` makes, and of one of ``scan_registry.nn``."""
    device = ids.device.type

    def modules() -> Any:
        torch.manual_seed(0)
        return LanguageModel(name, size).to(device, dtype)

    def training(model: Callable[[], Any], way: str) -> Callable[[], object]:
        return Training(model().train(), ids, way).run

    def generation(model: Callable[[], Any], way: str) -> Callable[[], object]:
        return Generation(model().eval(), ids[:1, :16].contiguous(), way).run

    models = {"scan_registry": own, "scan_registry.nn": modules}
    for way in ways:
        for what, make in (("training step", training), ("generated token", generation)):
            for path, model in models.items():
                yield Step(f"{what}, {way}", path, partial(make, model, way))
    both = "both passes of a block, limited by the CPU"
    yield Step(
        both, "scan_registry.nn", lambda: Blocks(name, size[0], device, dtype).run, BLOCK_COUNT
    )
