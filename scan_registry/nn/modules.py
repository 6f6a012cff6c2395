"""LSTM, GRU, RNN and SLSTM as torch.nn has, or would have, them."""

from __future__ import annotations

import torch
from torch import Tensor

from scan_registry.kernels.rnn.problem import RnnBackend
from scan_registry.nn import checks
from scan_registry.nn.recurrent import Recurrent

Device = torch.device | str | int | None


class LSTM(Recurrent[tuple[Tensor, Tensor]]):
    """``torch.nn.LSTM``; ``backend`` is that of ``scan_registry.rnn``. The states are (h, c).

    No kernel has projections: with ``proj_size`` torch's function runs, and with resets, in graphs and in transforms plain
    torch, step by step.

    Raises:
        TypeError, ValueError: an argument is not as in torch.nn, or there are ``proj_size`` and a ``backend`` other than
            "auto" and "reference".
    """

    function = "lstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        backend: RnnBackend = "auto",
    ) -> None:
        checks.check_projection(proj_size, backend)
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device, dtype, backend, proj_size=proj_size,
        )  # fmt: skip


class GRU(Recurrent[Tensor]):
    """``torch.nn.GRU``; ``backend`` is that of ``scan_registry.rnn``. The state is h.

    Raises:
        TypeError, ValueError: an argument is not as in torch.nn.
    """

    function = "gru"

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *, backend: RnnBackend = "auto",
    ) -> None:  # fmt: skip
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device, dtype, backend,
        )  # fmt: skip


class RNN(Recurrent[Tensor]):
    """``torch.nn.RNN`` with ``nonlinearity="tanh"``; ``backend`` is that of ``scan_registry.rnn``. The
    state is h.

    Raises:
        TypeError, ValueError: an argument is not as in torch.nn, or ``nonlinearity`` is another one.
    """

    function = "elman"

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh",
        bias: bool = True, batch_first: bool = False, dropout: float = 0.0,
        bidirectional: bool = False, device: Device = None, dtype: torch.dtype | None = None, *,
        backend: RnnBackend = "auto",
    ) -> None:  # fmt: skip
        checks.check_nonlinearity(nonlinearity)
        super().__init__(
            "RNN_TANH", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device, dtype, backend,
        )  # fmt: skip
        self.nonlinearity = nonlinearity


class SLSTM(Recurrent[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """sLSTM, with the arguments of ``torch.nn.LSTM`` and ``num_heads``, which do not see each other
    within a layer. The states are (h, c, n, m).

    Parameters are called as in ``torch.nn.LSTM``. Of ``weight_hh``, (4 · H, H / heads), rows are gates i, f,
    z, o, then heads, then units; columns are the units of the row's head.

    Raises:
        TypeError, ValueError: an argument is not as in torch.nn, or ``num_heads`` does not divide
            ``hidden_size``.
    """

    function = "slstm"

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *, num_heads: int = 1,
        backend: RnnBackend = "auto",
    ) -> None:  # fmt: skip
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device, dtype, backend, num_heads,
        )  # fmt: skip
        for name, weight in [*self.named_parameters()]:
            if name.startswith("weight_hh"):
                columns = self.hidden_size // num_heads
                setattr(self, name, torch.nn.Parameter(weight.detach()[:, :columns].clone()))
