"""What the tests of `onchip.compat` share."""

from __future__ import annotations

INF = float("inf")


def spelled(features: dict) -> dict:
    """onchip's keywords in FlashAttention's words."""
    names = {"scale": "softmax_scale", "window": "window_size"}
    return {names.get(name, name): value for name, value in features.items()}
