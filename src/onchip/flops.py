"""FLOP formulas for torch.utils.flop_counter, registered when that module is first imported.

Importing it here would import Triton along (torch does that), and `import onchip` must not.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

_COUNTER = "torch.utils.flop_counter"


class _AfterImport:
    """A finder that runs `action` once, after the counter's module has been imported."""

    def __init__(self, action: Callable[[], None]):
        self.action = action

    def find_spec(self, name: str, path=None, target=None):
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.action()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register(formulas: dict[object, Callable]) -> None:
    """Registers operator -> formula, now or when torch's FLOP counter is imported.

    Args:
        formulas: operator packet -> function of the operator's arguments (real tensors) and
            `out_val`, returning FLOPs.
    """

    def action() -> None:
        from torch.utils.flop_counter import register_flop_formula

        for operator, formula in formulas.items():
            register_flop_formula(operator, get_raw=True)(formula)

    if _COUNTER in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(action))  # type: ignore[arg-type]
