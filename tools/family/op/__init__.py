"""The public function, and what commands know of it."""
