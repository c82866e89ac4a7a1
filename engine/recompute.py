"""Gradient checkpointing (Chen et al. 2016): memory for time. A block keeps its input and runs again in backward.

The word "checkpoint" alone means the folder on disk, here as elsewhere.
"""

from collections.abc import Callable
from copy import deepcopy

from amp import policy
from engine.ops import drawing, generator
from engine.tensor import Tensor, backpropagate, is_recording, now, recording, remember, sources


def recompute(function: Callable[..., Tensor], *args) -> Tensor:
    """function(*args), a Tensor, without what was computed on the way. Gradients have the same bits as without.

    The second run drops the same units and computes in the same precision. What `function` uses without being given
    it, like weights, gets its gradient too. It must be a function of what it reads: a second run has to give the same.
    """
    if not is_recording():
        return function(*args)
    low, random, since = policy.compute_dtype(), deepcopy(generator()), now()
    first = function(*args)
    used = sources([first], since)

    def derive(dy):
        since = now()
        with policy.computing(low), drawing(random), recording(True):
            second = function(*args)
        gradients = backpropagate(second.node, dy, since)
        return [gradients.get(node) for node in used]

    return remember(first.data, used, derive)  # here the graph of the first run goes
