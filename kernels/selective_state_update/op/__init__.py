"""``selective_state_update`` for torch: the public function, its checks, plans and derivatives."""
