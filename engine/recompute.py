"""Gradient checkpointing (Chen et al. 2016): less memory for more time.

A recomputed block keeps its input and frees the arrays that it computed; in backward it runs again.

The word "checkpoint" alone means the folder on disk, here as elsewhere.
"""

from collections.abc import Callable
from copy import deepcopy

from amp import policy
from engine.graph import backpropagate, is_recording, next_age, recording, sources
from engine.ops import current_generator, drawing
from engine.tensor import Tensor, record_nodes


def recompute(function: Callable[..., Tensor], *args) -> Tensor:
    """function(*args), a Tensor, without keeping the arrays that were computed on the way.

    The second run drops the same units and computes in the same precision as the first, so `function` must
    give the same result whenever it reads the same. Tensors that it uses without being given them, like
    weights, get their gradients, too.

    Gradients have the same bits as without `recompute`, with one exception: a tensor that is used several
    times inside `function` and again after it. Its uses inside are summed first, then added to those after
    it; without `recompute` all are added one by one. The sums may round differently.
    """
    if not is_recording():
        return function(*args)
    dtype = policy.compute_dtype()
    generator = deepcopy(current_generator())
    since = next_age()
    first = function(*args)
    used = sources([first.node], since)

    def backward(dy):
        since = next_age()
        with policy.computing(dtype), drawing(generator), recording(True):
            second = function(*args)
        if second.node is None:
            raise RuntimeError("recompute: the result required a gradient in the first run, none in the second")
        gradients = backpropagate(second.node, dy, since)
        return [gradients.get(node) for node in used]

    return record_nodes(first.data, used, backward)  # the graph of the first run is freed here
