"""A plain training loop in NumPy float64: two-layer network, every rule written out. Shares nothing with src."""

from __future__ import annotations

import numpy as np


def train(weights, x, y, *, rule, lr, batch, accumulate=1, clip=None, epochs=1, momentum=0.0, decay=0.0):
    """Mean cross-entropy of every update, and the weights after the last. Rows are taken as they lie."""
    w1, b1, w2, b2 = (np.array(w, dtype=np.float64) for w in weights)
    parameters, memory, losses, t = [w1, b1, w2, b2], [{} for _ in range(4)], [], 0
    for _ in range(epochs):
        for start in range(0, len(x), batch * accumulate):
            xs, ys = x[start : start + batch * accumulate], y[start : start + batch * accumulate]
            hidden = np.maximum(xs @ w1.T + b1, 0.0)
            scores = hidden @ w2.T + b2
            scores -= scores.max(1, keepdims=True)
            p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            losses.append(-np.log(p[np.arange(len(ys)), ys]).mean())
            d = (p - np.eye(p.shape[1])[ys]) / len(ys)
            dh = (d @ w2) * (hidden > 0)
            grads = [dh.T @ xs, dh.sum(0), d.T @ hidden, d.sum(0)]
            if clip is not None:
                norm = np.sqrt(sum((g**2).sum() for g in grads))
                grads = [g * min(1.0, clip / (norm + 1e-6)) for g in grads]
            t += 1
            for w, g, m in zip(parameters, grads, memory, strict=True):
                g = g + decay * w
                if rule == "sgd":
                    m["v"] = momentum * m["v"] + g if "v" in m else g
                    w -= lr * m["v"]
                else:  # adam
                    m["m"] = 0.9 * m.get("m", 0.0) + 0.1 * g
                    m["s"] = 0.999 * m.get("s", 0.0) + 0.001 * g**2
                    w -= lr * (m["m"] / (1 - 0.9**t)) / (np.sqrt(m["s"] / (1 - 0.999**t)) + 1e-8)
    return losses, parameters
