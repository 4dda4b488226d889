"""Whether an object is a tensordict, without importing tensordict: that takes seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictParams
    from typing_extensions import TypeIs


def is_tensordict(value: object) -> TypeIs[TensorDictBase]:
    """Whether ``value`` is a tensordict. While tensordict is not imported, nothing can be one.

    Args:
        value: any object.

    Example:
        >>> from tensordict import TensorDict
        >>> is_tensordict(TensorDict()), is_tensordict({})
        (True, False)
    """
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def is_tensordict_params(value: object) -> TypeIs[TensorDictParams]:
    """Whether ``value`` is a module that holds a tensordict of parameters.

    Args:
        value: any object.

    Example:
        >>> from tensordict.nn import TensorDictParams
        >>> is_tensordict_params(TensorDictParams())
        True
    """
    module = sys.modules.get("tensordict.nn")
    return module is not None and isinstance(value, module.TensorDictParams)
