"""The node of a graph that holds what the pass did with it.

Inductor writes it into the head of the generated file, which is what its caches keep and each compilation loads:

    weft_graph_loaded("...")

So a compilation that takes the graph from a cache, and does not run the pass, fills the report all the same.
"""

from __future__ import annotations

import base64
import pickle
import zlib
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V

from ..graph.effects import op_with_effect

# Where a graph is run and not generated no cache has it.
_record = op_with_effect("record(str packed)", lambda packed: None)


def is_kept() -> bool:
    """Whether Inductor keeps the code of the graph that it is about to generate."""
    if inductor_config.force_disable_caches or inductor_config.fx_wrapper or V.aot_compilation:
        return False
    caches = inductor_config.fx_graph_cache, inductor_config.fx_graph_remote_cache
    return bool(any(caches) or functorch_config.bundled_autograd_cache)


def put_record(graph: fx.Graph, packed: str) -> None:
    from . import lowering  # noqa: F401  (tells Inductor what the node is)

    with graph.inserting_before(graph.output_node()):  # the question is the first of all
        node = graph.call_function(_record, (packed,))
    # Lite mode, too, then writes it by its lowering: it would call the op in each run, and a cached graph have none.
    node.meta.update(val=None, custom={"compile_with_inductor": True})


def take_record(graph: fx.Graph) -> None:
    """Out of a graph that another one calls, whose record has it."""
    for node in graph.find_nodes(op="call_function", target=_record):
        graph.erase_node(node)


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value), 6)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(text)))
