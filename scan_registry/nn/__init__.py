"""Modules on ``rnn``, with the constructors and the state dicts of torch.nn's: a model swaps one line."""

from __future__ import annotations

from scan_registry.nn.modules import GRU, LSTM, RNN, SLSTM

__all__ = ["GRU", "LSTM", "RNN", "SLSTM"]
