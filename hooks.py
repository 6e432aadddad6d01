"""What a lower package of weft has a higher one do, which it does not import.

The root package sets each of them, before any other part of weft can be imported. This module imports no part of weft.
"""

from collections.abc import Callable
from typing import Any

#: Makes what moves the registered tensors of a ``Registry`` on CUDA.
cuda_transfers: Callable[[Any], Any]
#: Checks a new ``Heap`` on GPUs that no kernel was ever run on; raises HeapUnavailable. Collective.
check_new_heap: Callable[[Any], None]
#: Defines ``torch.ops.weft``, of which registered tensors are calls in graphs.
define_ops: Callable[[], None]
#: Tells torch.distributed of the backend "weft", if it is imported.
register_backend: Callable[[], None]
