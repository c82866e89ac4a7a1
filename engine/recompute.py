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

    Backward runs `function` again, with the same dropout and in the same precision. The function must give the
    same result both times. A tensor that it uses without being given it, like a weight, gets its gradient, too.

    Gradients have the same bits as without `recompute`, with one exception: a tensor that is used several
    times inside `function` and again after it. `recompute` adds up the gradients of the uses inside, and then
    adds that sum to the gradients of the uses after it. Without `recompute` all of them are added one by one,
    and the sums may round differently.
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
