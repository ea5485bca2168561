"""Other libraries' names for onchip's functions.

`onchip.compat.flash_attn` and `onchip.compat.flash_attn_3` can be imported as they are; `install`
puts them where programs written for FlashAttention look, so that those run unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

from onchip.compat import bert_padding, flash_attn, flash_attn_3

__all__ = ["install", "uninstall"]

# Module name: where its functions come from.
_SOURCES = {
    "flash_attn": flash_attn,
    "flash_attn.flash_attn_interface": flash_attn,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn_interface": flash_attn_3,
}
# Top-level module: the distribution that programs ask for its version.
_DISTRIBUTIONS = {
    "flash_attn": ("flash-attn", flash_attn.__version__),
    "flash_attn_interface": ("flash-attn-3", flash_attn_3.__version__),
}
_replaced: dict[str, ModuleType] = {}


def install(force: bool = False) -> dict[str, ModuleType]:
    """Makes `import flash_attn` and `import flash_attn_interface` give onchip's functions.

    Also for `importlib.util.find_spec` and `importlib.metadata.version`, by which programs ask.
    Call it before those programs are imported: what they imported or asked before stays as it was.
    Calling it again changes nothing.

    Args:
        force: even where a real package of one of the names is installed; it is hidden until
            `uninstall`.

    Returns:
        The modules by name.

    Mutates:
        sys.modules, sys.meta_path.

    Raises:
        RuntimeError: if a real package is installed, and not force; nothing was changed.
    """
    if _finder in sys.meta_path:
        return {name: sys.modules[name] for name in _SOURCES}
    real = [name for name in _DISTRIBUTIONS if _exists(name)]
    if real and not force:
        raise RuntimeError(
            f"install: {', '.join(real)} is installed; allowed: neither of "
            f"{', '.join(_DISTRIBUTIONS)}. Use that package, or install(force=True) to hide it."
        )
    for name in [name for name in sys.modules if name.split(".")[0] in _DISTRIBUTIONS]:
        _replaced[name] = sys.modules.pop(name)
    modules = {name: _module(name) for name in _SOURCES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    sys.meta_path.insert(0, _finder)
    return modules


def uninstall() -> None:
    """Undoes `install`; the modules that it hid are back. Without it, changes nothing.

    Mutates:
        sys.modules, sys.meta_path.
    """
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in _SOURCES:
        sys.modules.pop(name, None)
    sys.modules.update(_replaced)
    _replaced.clear()


def _exists(name: str) -> bool:
    """Whether a module is loaded or could be."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # in sys.modules, without a spec
        return True


def _module(name: str) -> ModuleType:
    """A module that holds a source's public names."""
    source = _SOURCES[name]
    is_package = any(other.startswith(f"{name}.") for other in _SOURCES)
    spec = importlib.machinery.ModuleSpec(name, None, origin=source.__name__, is_package=is_package)
    module = ModuleType(name, source.__doc__)
    module.__spec__ = spec
    module.__file__ = source.__file__
    module.__package__ = spec.parent
    if is_package:
        module.__path__ = []
    for public in source.__all__:
        setattr(module, public, getattr(source, public))
    module.__all__ = list(source.__all__)  # type: ignore[attr-defined]
    if name in _DISTRIBUTIONS:
        module.__version__ = _DISTRIBUTIONS[name][1]  # type: ignore[attr-defined]
    return module


class _Distribution(importlib.metadata.Distribution):
    """Metadata of an imitated package, for `importlib.metadata`."""

    def __init__(self, module: str):
        self._module = module

    def read_text(self, filename: str) -> str | None:
        """The two files that versions and top-level modules are read from."""
        name, version = _DISTRIBUTIONS[self._module]
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{self._module}\n",
        }
        return files.get(filename)

    def locate_file(self, path):
        """None of its files exist."""
        raise FileNotFoundError(f"{path}: {self._module} is imitated by onchip.compat")


class _Finder(importlib.abc.MetaPathFinder):
    """Answers `importlib.metadata`; modules themselves are in sys.modules."""

    def find_spec(self, fullname, path=None, target=None):
        """Finds no module: those that exist are loaded."""
        return None

    def find_distributions(self, context=None):
        """The imitated packages, or the one asked for."""
        asked = None if context is None else context.name
        for module, (name, _) in _DISTRIBUTIONS.items():
            if asked is None or asked.lower().replace("_", "-") == name:
                yield _Distribution(module)


_finder = _Finder()
