"""The name under which this copy of the package is imported.

It is ``scan_registry``, unless the ``kernels`` library of Hugging Face has loaded the copy from a folder, under a name of the
copy's own (see ci/hub.py). Code that imports a module by name begins with this name, so that two copies in one process stay apart.
"""

from __future__ import annotations

NAME = __name__.partition(".")[0]
#: What the package's folder is called in every copy.
FOLDER = "scan_registry"
