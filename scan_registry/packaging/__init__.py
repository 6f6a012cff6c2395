"""Packages that bring archives: what a wheel is, what a provider holds, and how a cache becomes one."""
