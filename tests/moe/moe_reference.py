"""The layer and its gradients in NumPy, one token and one expert at a time: the oracle."""

from __future__ import annotations

import numpy

LAYER = {"dim": 16, "hidden_dim": 8, "num_experts": 5, "top_k": 2}


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


def choose(scores, top_k, bias=None, groups=None, limited=None, best=2):
    """Expert numbers `[tokens, top_k]`, best first."""
    choice = scores + (0 if bias is None else bias)
    if groups is not None:
        grouped = choice.reshape(len(choice), groups, -1)
        of_groups = numpy.sort(grouped, -1)[..., -best:].sum(-1)
        for token, order in enumerate(numpy.argsort(-of_groups, -1, kind="stable")):
            grouped[token, order[limited:]] = -numpy.inf
        choice = grouped.reshape(choice.shape)
    return numpy.argsort(-choice, -1, kind="stable")[:, :top_k]


class ReferenceMoE:
    """Weights are float64 arrays by the names of `MoE`'s parameters."""

    def __init__(self, weights, top_k, *, score_func="softmax", route_norm=False, route_scale=1.0, before=False):
        self.w = {name: value.astype(numpy.float64) for name, value in weights.items()}
        self.top_k, self.score_func = top_k, score_func
        self.route_norm, self.route_scale, self.before = route_norm, route_scale, before

    def __call__(self, x, grad):
        """Output for `x` `[tokens, dim]`, the gradient of `x`, and those of all weights, for output gradient `grad`."""
        self.grads = {name: numpy.zeros_like(value) for name, value in self.w.items()}
        scores = self._scores(x)
        experts = choose(scores, self.top_k)
        out, dx = numpy.zeros_like(x), numpy.zeros_like(x)
        for t in range(len(x)):
            weights, pull_back = self._weights(scores[t], experts[t])
            dweights = numpy.zeros(self.top_k)
            for k, e in enumerate(experts[t]):
                y, back = self._expert(e, x[t] * weights[k] if self.before else x[t])
                out[t] += y if self.before else y * weights[k]
                dinput = back(grad[t] if self.before else grad[t] * weights[k])
                dweights[k] = dinput @ x[t] if self.before else grad[t] @ y
                dx[t] += dinput * weights[k] if self.before else dinput
            dlogits = self._through_scores(scores[t], pull_back(dweights))
            self.grads["router.gate.weight"] += numpy.outer(dlogits, x[t])
            dx[t] += dlogits @ self.w["router.gate.weight"]
        if "shared_experts.w1.weight" in self.w:
            self._shared(x, grad, out, dx)
        return out, dx, self.grads

    def _scores(self, x):
        logits = x @ self.w["router.gate.weight"].T
        if self.score_func == "sigmoid":
            return sigmoid(logits)
        e = numpy.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def _through_scores(self, scores, dscores):
        if self.score_func == "sigmoid":
            return dscores * scores * (1 - scores)
        return scores * (dscores - dscores @ scores)

    def _weights(self, scores, chosen):
        picked = scores[chosen]
        total = picked.sum() if self.route_norm else 1.0
        weights = picked / total * self.route_scale

        def pull_back(dweights):
            dpicked = dweights * self.route_scale / total
            if self.route_norm:
                dpicked = dpicked - (dpicked @ picked) / total
            dscores = numpy.zeros_like(scores)
            dscores[chosen] = dpicked
            return dscores

        return weights, pull_back

    def _expert(self, e, row):
        names = ("experts.w1", "experts.w2", "experts.w3")
        w1, w2, w3 = (self.w[name][e] for name in names)
        y, back = _swiglu(w1, w2, w3, row)

        def into_grads(dy):
            drow, grads = back(dy)
            for name, grad in zip(names, grads, strict=True):
                self.grads[name][e] += grad
            return drow

        return y, into_grads

    def _shared(self, x, grad, out, dx):
        names = [f"shared_experts.w{i}.weight" for i in (1, 2, 3)]
        for t in range(len(x)):
            y, back = _swiglu(*(self.w[name] for name in names), x[t])
            drow, grads = back(grad[t])
            out[t] += y
            dx[t] += drow
            for name, each in zip(names, grads, strict=True):
                self.grads[name] += each


def _swiglu(w1, w2, w3, row):
    a, b = w1 @ row, w3 @ row
    s = sigmoid(a)
    h = a * s * b

    def back(dy):
        dh = w2.T @ dy
        da, db = dh * b * (s + a * s * (1 - s)), dh * a * s
        return w1.T @ da + w3.T @ db, (numpy.outer(da, row), numpy.outer(dy, h), numpy.outer(db, row))

    return w2 @ h, back


def outputs_and_gradients(platform, layer, y, x):
    """Return `y`, and the gradients of `x` and of the parameters for the loss `sum(y * y)`, which are then reset."""
    platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
    grads = [platform.get_grad(x), *(platform.get_grad(p) for _, p in platform.named_parameters(layer))]
    arrays = [platform.to_numpy(platform.detach(each)).copy() for each in (y, *grads)]
    for _, p in platform.named_parameters(layer):
        platform.set_grad(p, None)
    platform.set_grad(x, None)
    return arrays
