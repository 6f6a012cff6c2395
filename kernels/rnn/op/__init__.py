"""``rnn`` for torch: the public function, its checks, plans and derivatives."""
