"""``python -m scan_registry`` is the command ``scan-registry``."""

import sys

from scan_registry.cli import main

sys.exit(main())
