"""``ssd_scan`` for torch: the public function, its checks, plans and derivatives."""
