"""Makes stand-ins importable under the names of the packages that they stand in for, and puts code into transformers' models.

A finder answers for these names: modules with the public names of this package's, with a
``__spec__`` of their own, and metadata with a version. So ``importlib.util.find_spec`` and ``importlib.metadata.version``
find them like an installed package, which is how libraries ask whether one is there.

RecurrentGemma looks for no package: its scan is a method of its own, which ``recurrent_gemma`` replaces.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from scan_registry.base.suggestion import accepted_words

__all__ = ["install", "uninstall"]


class StandIn(NamedTuple):
    """What stands in for a package."""

    #: The package's own version with the functions that there are here, and who provides them.
    version: str
    #: The name of each module after the package's, and this package's in ``compat`` that it has the names of.
    modules: dict[str, str]


_CONV = "causal_conv1d"
#: Functions that take the weights of a whole block, each of its modules' weights by itself.
_BLOCKS = ("mamba_inner_fn", "mamba_split_conv1d_scan_combined")
STAND_INS = {
    "causal_conv1d": StandIn(
        "1.6.0+scan.registry",
        dict.fromkeys(("", ".causal_conv1d_interface", ".causal_conv1d_varlen"), _CONV)
        | {".cpp_functions": f"{_CONV}.cpp_functions"},
    ),
    # A version with the kernels of Mamba-2 but not of Mamba-3, so that programs that need these see that they are missing.
    "mamba_ssm": StandIn(
        "2.2.6+scan.registry",
        {
            name.removeprefix("mamba_ssm"): name
            for name in (
                "mamba_ssm",
                "mamba_ssm.modules",
                "mamba_ssm.modules.mamba2",
                "mamba_ssm.modules.mamba2_simple",
                "mamba_ssm.modules.mamba_simple",
                "mamba_ssm.ops",
                "mamba_ssm.ops.selective_scan_interface",
                "mamba_ssm.ops.triton",
                "mamba_ssm.ops.triton.layernorm_gated",
                "mamba_ssm.ops.triton.selective_state_update",
                "mamba_ssm.ops.triton.ssd_combined",
            )
        },
    ),
}
#: Models of transformers whose own code is replaced, each by the module of ``compat`` of its name.
MODELS = ("recurrent_gemma",)


def install(*packages: str) -> None:
    """Make ``import mamba_ssm`` and ``import causal_conv1d`` find this package's stand-ins, and put RecurrentGemma on this
    package's scan, in this process. Installing again changes nothing.

    transformers' models use neither ``mamba_inner_fn`` nor ``mamba_split_conv1d_scan_combined``, so that they train the
    function that they evaluate. All other code imports both as from mamba_ssm.

    Name packages before what uses them is imported: transformers binds them when a model's module is.
    ``"recurrent_gemma"`` may be named at any time. It replaces the method of transformers in which an RG-LRU computes its
    gates and states, so that models that were made before have the new one, too. A model that is already compiled keeps
    its code until ``torch.compiler.reset()``.

    Args:
        *packages: ``"mamba_ssm"``, ``"causal_conv1d"``, ``"recurrent_gemma"``.

    Raises:
        TypeError: the names are in a list or another collection.
        ValueError: no package is named, or one that there is no such stand-in for.
        ImportError: a package of this name is importable already, which is not replaced; or transformers is not
            installed, or its RecurrentGemma is not as expected. Nothing is installed then.

    Warns:
        RuntimeWarning: a model of transformers that looks for these packages was imported before; it keeps its own
            path.
    """
    names = _known(packages)
    if not names:
        raise ValueError(f"install takes one name or more of {', '.join((*STAND_INS, *MODELS))}")
    missing = [name for name in names if name in STAND_INS and name not in _finder.names]
    for name in missing:
        _refuse_original(name)
    for name in MODELS:
        if name in names:
            importlib.import_module(f"{__package__}.{name}").replace()
    if not missing:
        return
    late = sorted(filter(_looked_for, [*sys.modules]))
    if late:
        keeps = (
            "was imported before and keeps its"
            if len(late) == 1
            else "were imported before and keep their"
        )
        warnings.warn(
            f"{', '.join(late)} {keeps} own path; call scan_registry.compat.install before the model's module is imported",
            RuntimeWarning,
            stacklevel=2,
        )
    _activate(missing)


def _activate(missing: list[str]) -> None:
    """Let the finder find stand-ins: before all others if one replaces a folder that merely bears a name."""
    _finder.names.update(missing)
    if any(_is_folder(name) for name in missing):
        uncovered = [finder for finder in sys.meta_path if finder is not _finder]
        sys.meta_path[:] = [_finder, *uncovered]
        for name in missing:
            sys.modules.pop(name, None)
    elif _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    importlib.invalidate_caches()


def uninstall(*packages: str) -> None:
    """Take ``install`` back; without names, for all packages. What is not installed is left alone.

    Modules that have imported a function keep it. Models of RecurrentGemma have their own method again.

    Args:
        *packages: as of ``install``.

    Raises:
        ValueError: there is no such stand-in.
    """
    for name in _known(packages, "uninstall") or [*_finder.names, *MODELS]:
        if name in MODELS:
            # What was not imported has replaced nothing.
            if replaced := sys.modules.get(f"{__package__}.{name}"):
                replaced.restore()
            continue
        if name not in _finder.names:
            continue
        _finder.names.discard(name)
        for module in [*sys.modules]:
            if module == name or module.startswith(f"{name}."):
                del sys.modules[module]
    if not _finder.names and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _known(packages: Iterable[Any], taker: str = "install") -> list[str]:
    names = [*packages]
    for name in names:
        if isinstance(name, (list, tuple, set, frozenset)):
            one_by_one = ", ".join(map(repr, name))
            raise TypeError(
                f"{name!r} is a {type(name).__name__}; pass the names one by one: {one_by_one}"
            )
        if not isinstance(name, str) or name not in (*STAND_INS, *MODELS):
            words = accepted_words(str(name).replace("-", "_").lower(), (*STAND_INS, *MODELS))
            raise ValueError(
                f"{name!r} is not what {taker} takes; {words}{'' if words.endswith('?') else '.'} "
                "Stand-ins for other packages are modules of scan_registry.compat, to be imported from there"
            )
    return [*dict.fromkeys(names)]


def _is_folder(name: str) -> bool:
    """Whether all that there is by that name is a folder that merely bears it, such as a checkout of the package: Python
    takes any folder for a package, before it asks a later finder."""
    if name in sys.modules:
        spec = getattr(sys.modules[name], "__spec__", None)
    else:
        spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is not None or spec.submodule_search_locations is None:
        return False
    inside = [place.split(".")[1] for place in STAND_INS[name].modules if place]
    return not any(
        any(Path(folder).glob(pattern))
        for folder in spec.submodule_search_locations
        for place in inside
        for pattern in (place, f"{place}.*")
    )


def _refuse_original(name: str) -> None:
    if _is_folder(name):
        return
    if name in sys.modules:
        origin: Any = getattr(sys.modules[name], "__file__", None) or "this process"
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return
        origin = spec.origin or ", ".join(spec.submodule_search_locations or [])
    raise ImportError(
        f"{name} is importable already, from {origin}; it is not replaced. Uninstall it, or import "
        f"scan_registry.compat.{name} instead",
        name=name,
    )


def _looked_for(module: str) -> bool:
    """Whether it is a model of transformers that has looked for a stand-in's functions."""
    if not module.startswith("transformers.models.") or ".modeling_" not in module:
        return False
    members = vars(sys.modules[module])
    own = ("mamba_inner_fn", "mamba_selective_scan", "mamba2_chunk_scan", "causal_conv1d_fn")
    return any(name in members for name in own)


class _Finder:
    """Finds the modules and the metadata of what is installed. The last of all finders, as it is to hide nothing; the first
    where a folder is to be hidden that bears a package's name."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """That of a module of an installed stand-in."""
        package = fullname.partition(".")[0]
        if package not in self.names:
            return None
        modules = STAND_INS[package].modules
        place = fullname.removeprefix(package)
        if place not in modules:
            return None
        source = importlib.util.find_spec(f"{__package__}.{modules[place]}")
        assert source is not None
        loader: Any = _Loader(source.name)
        spec = importlib.util.spec_from_file_location(fullname, source.origin, loader=loader)
        assert spec is not None
        if any(other.startswith(f"{place}.") for other in modules):
            spec.submodule_search_locations = []  # a package, whose modules no other finder finds
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Those of installed stand-ins."""
        wanted = None if context is None else context.name
        for name in sorted(self.names):
            if wanted is None or _normalized(wanted) == _normalized(name):
                yield _Distribution(name)

    def invalidate_caches(self) -> None:
        """There are none."""


class _Loader:
    """Makes a module with the public names of another."""

    def __init__(self, source: str) -> None:
        self.source = source

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python does."""

    def exec_module(self, module: ModuleType) -> None:
        """Take the names that the other module has, and load what a package holds."""
        source = importlib.import_module(self.source)
        importlib.import_module(f"{__package__}.exporting").replace()
        module.__doc__ = source.__doc__
        public = [*source.__all__]
        vars(module)["__all__"] = public
        if "." not in module.__name__:
            vars(module)["__version__"] = STAND_INS[module.__name__].version
        blocks = {name: getattr(source, name) for name in public if name in _BLOCKS}
        if blocks:
            vars(module)["__getattr__"] = _unless_transformers_asks(module.__name__, blocks)
            vars(module)["__dir__"] = lambda: sorted({*vars(module), *public})
        for name in public:
            if name in blocks:
                continue
            value = getattr(source, name)
            if isinstance(value, ModuleType):
                value = importlib.import_module(f"{module.__name__}.{name}")
            setattr(module, name, value)


class _Distribution(importlib.metadata.Distribution):
    """Metadata: a name, a version, and where it is from."""

    def __init__(self, package: str) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        """Of the files that an installed package has beside its code, those that are asked for."""
        if filename == "METADATA":
            return (
                f"Metadata-Version: 2.1\nName: {self._package.replace('_', '-')}\n"
                f"Version: {STAND_INS[self._package].version}\n"
                f"Summary: scan_registry.compat.{self._package}, installed in this process\n"
            )
        if filename == "top_level.txt":
            return f"{self._package}\n"
        return None

    def locate_file(self, path: Any) -> Path:
        """Where a file of the package would be."""
        return Path(__file__).resolve().parent.joinpath(path)


def _unless_transformers_asks(module: str, functions: dict[str, Any]) -> Any:
    """A module's ``__getattr__`` that has these functions, and for transformers' own code one that does nothing.

    In training, Mamba and FalconMamba call ``mamba_inner_fn``, and models of Mamba-2 ``mamba_split_conv1d_scan_combined``,
    with bare weights, which leaves out adapters, hooks and masks, in FalconMamba the place of a norm, and in Mamba2, Bamba
    and GraniteMoeHybrid that their norm has one group. Where these functions return None, as transformers' own do, the
    models go on with the convolution and the scan, as in evaluation.
    """

    def find(name: str) -> Any:
        if name not in functions:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        if asking.partition(".")[0] != "transformers":
            return functions[name]
        # Where this module was imported before transformers was.
        importlib.import_module(f"{__package__}.exporting").replace()
        return _no_block

    return find


def _no_block(*_: Any, **__: Any) -> None:
    """What transformers' models find as a function that takes the weights of a whole block."""


def _normalized(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


_finder: Any = _Finder()
