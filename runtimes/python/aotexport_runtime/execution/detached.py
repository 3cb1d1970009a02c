"""Results that are no views: autograd refuses to let a caller change views that a custom function returns."""

from __future__ import annotations

from typing import Any

import torch


def without_base(value: Any) -> Any:
    """Return a tensor that is no view; a view is detached from its base, and shares its memory and version.

    Operators may return no tensor where their metadata promises one (workspaces that a kernel does not use).
    """
    return value.detach() if isinstance(value, torch.Tensor) and value._is_view() else value
