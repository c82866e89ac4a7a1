"""The GPT as a user of HIPS autograd would write it: functions of autograd.numpy, value_and_grad, AdamW in NumPy.

fp32 throughout. BLAS takes the threads that it finds.
"""

import autograd.numpy as np
import numpy
from autograd import value_and_grad


def layer_norm(x, weight, bias):
    x = x - np.mean(x, axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight + bias


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def softmax(x):
    x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return x / np.sum(x, axis=-1, keepdims=True)


def block(x, w, prefix, heads, mask):
    def p(name):
        return w[prefix + name]

    B, T, C = x.shape
    h = np.dot(layer_norm(x, p("ln_1.weight"), p("ln_1.bias")), p("attn.c_attn.weight").T) + p("attn.c_attn.bias")
    q, k, v = (np.transpose(np.reshape(t, (B, T, heads, -1)), (0, 2, 1, 3)) for t in np.split(h, 3, axis=-1))
    a = softmax(np.matmul(q, np.transpose(k, (0, 1, 3, 2))) * (C // heads) ** -0.5 + mask)
    y = np.reshape(np.transpose(np.matmul(a, v), (0, 2, 1, 3)), (B, T, C))
    x = x + np.dot(y, p("attn.c_proj.weight").T) + p("attn.c_proj.bias")
    h = np.dot(layer_norm(x, p("ln_2.weight"), p("ln_2.bias")), p("mlp.c_fc.weight").T) + p("mlp.c_fc.bias")
    return x + np.dot(gelu(h), p("mlp.c_proj.weight").T) + p("mlp.c_proj.bias")


def loss_of(w, x, y, layers, heads):
    B, T = x.shape
    mask = numpy.triu(numpy.full((T, T), -1e9, numpy.float32), 1)
    h = w["wte.weight"][x] + w["wpe.weight"][:T]
    for layer in range(layers):
        h = block(h, w, f"h.{layer}.", heads, mask)
    logits = np.reshape(np.dot(layer_norm(h, w["ln_f.weight"], w["ln_f.bias"]), w["wte.weight"].T), (B * T, -1))
    logits = logits - np.max(logits, axis=-1, keepdims=True)
    picked = logits[numpy.arange(B * T), y.ravel()]
    return np.mean(np.log(np.sum(np.exp(logits), axis=-1)) - picked)


def build(config, weights, dtype: str, device: str, compiled: bool):
    """A training step: (x, y) int64 (B, T) -> the loss."""
    assert dtype == "fp32"
    assert device == "cpu"
    w = {name: array.copy() for name, array in weights.items()}
    first, second = ({name: numpy.zeros_like(array) for name, array in w.items()} for _ in range(2))
    gradient_of, done = value_and_grad(loss_of), 0

    def step(x, y):
        nonlocal done
        loss, gradients = gradient_of(w, x, y, config.n_layer, config.n_head)
        norm = numpy.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        done += 1
        for name, g in gradients.items():
            g = (g * min(1.0, 1.0 / (norm + 1e-6))).astype(numpy.float32)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g * g
            update = first[name] / (1 - 0.9**done) / (numpy.sqrt(second[name] / (1 - 0.999**done)) + 1e-8)
            w[name] = w[name] * (1 - 1e-3 * 0.01) - 1e-3 * update
        return loss

    return step
