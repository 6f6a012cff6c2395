"""``causal_conv1d`` for torch: the public function, its checks, plans and derivatives."""
