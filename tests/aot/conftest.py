"""The scripts of ci/ as modules."""

from __future__ import annotations

import sys
from pathlib import Path

# After the installed package: beside ci/ lie the sources.
sys.path.append(str(Path(__file__).parents[2]))
