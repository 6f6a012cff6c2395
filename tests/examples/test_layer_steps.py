"""``examples/layer_steps.py``: steps on pools compute what the layers do with whole sequences, and each batch has a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_path import EXAMPLES, load

steps: Any = load(EXAMPLES / "layer_steps.py")
WIDTH, LAYERS, BATCH, TIME = 32, 2, 3, 6
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
BOTH = pytest.mark.parametrize("name", steps.BLOCKS)


@BOTH
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_sequences_of_both_halves_of_the_pools_go_on(name: str, device: str) -> None:
    """Their slots are read anew by each step, or on a GPU by each replay of one graph."""
    torch.manual_seed(0)
    stack = steps.Stack(name, WIDTH, LAYERS).to(device)
    stepped = steps.Steps(stack, BATCH, torch.float32)
    x = torch.randn(2, BATCH, TIME, WIDTH, device=device)
    halves = torch.randperm(2 * BATCH).int().to(device).chunk(2)
    y = torch.zeros_like(x)
    for t in range(TIME):
        for half, slots in enumerate(halves):
            stepped.x.copy_(x[half, :, t])
            stepped.run(slots)
            y[half, :, t] = stepped.y
    with torch.no_grad():
        expected = stack(x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_bytes_are_those_of_weights_and_of_states_there_and_back() -> None:
    stack = steps.Stack("mamba2", WIDTH, LAYERS).bfloat16()
    one, two = (steps.Steps(stack, batch, torch.float32).bytes() for batch in (1, 2))
    block = stack.layers[0].block
    (channels, width), (heads, size, states) = block.state_sizes
    of_sequence = channels * (width - 1) * 2 + heads * size * states * 4
    assert two - one == 2 * LAYERS * of_sequence
    assert 2 * one - two == 2 * sum(p.numel() for p in stack.parameters())


def test_each_batch_of_each_block_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--width", "32", "--layers", "2", "--batch", "1", "3", "--repeats", "1")
    steps.main([*sizes, "--device", "cpu"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kinds = [(name, batch) for name in steps.BLOCKS for batch in ("1", "3")]
    assert [(name, batch) for name, batch, *_ in cells] == kinds
    for _, batch, of_layer, of_token, _ in cells:
        assert float(of_token) == pytest.approx(float(of_layer) / int(batch), rel=0.01)


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        steps.main(["lstm"])
