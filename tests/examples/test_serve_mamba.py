"""``examples/serve_mamba.py``: each of 64 sequences is served as if it were alone."""

from __future__ import annotations

import pytest
import torch
from by_path import EXAMPLES, load


def test_each_sequence_is_as_if_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """While prefixes are reused, and some drafts are right and others wrong."""
    assert load(EXAMPLES / "serve_mamba.py").main(["--device", "cpu"]) < 5e-6
    served, reused, drafts, _ = capsys.readouterr().out.splitlines()
    assert " of 64 sequences in " in served
    for line in (reused, drafts):
        part, whole = (int(word) for word in line.split() if word.isdigit())
        assert whole / 4 < part < 3 * whole / 4


def test_a_wrong_state_is_noticed() -> None:
    """A server that counts one token too many goes on from the states after a wrong draft."""
    module = load(EXAMPLES / "serve_mamba.py")

    class Wrong(module.Server):  # type: ignore[misc, name-defined]
        def step(self) -> None:
            super().step()
            for sequence in self.active:
                sequence.accepted = min(sequence.accepted + 1, module.TOKENS)

    torch.manual_seed(0)
    model, sequences = module.Model(), module.drawn(8, seed=1)
    Wrong(model, 4, 8, "cpu").run(sequences)
    assert max(module.difference(model, s, "cpu") for s in sequences) > 1e-3


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    assert load(EXAMPLES / "serve_mamba.py").main(["--device", "cuda"]) < 1e-3
