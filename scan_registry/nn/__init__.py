"""Modules: ``LSTM``, ``GRU``, ``RNN`` and ``SLSTM`` on ``rnn`` with the constructors and the state dicts of torch.nn's, and
``Mamba`` on ``selective_scan`` with those of mamba_ssm's. A model swaps one line."""

from __future__ import annotations

from scan_registry.nn.mamba import Mamba
from scan_registry.nn.modules import GRU, LSTM, RNN, SLSTM

__all__ = ["GRU", "LSTM", "RNN", "SLSTM", "Mamba"]
