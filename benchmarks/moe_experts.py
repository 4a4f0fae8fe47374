"""Forward and backward of one expert layer: hp_moe's and other implementations, in one process on the same data.

    python benchmarks/moe_experts.py                                # CPU: a small layer in float32
    python benchmarks/moe_experts.py --device cuda                  # T 16384, H 2048, I 768, E 128, K 8 in bfloat16
    python benchmarks/moe_experts.py --only hp grouped_mm

Contenders are measured in turns. Each gets tokens, expert numbers and scores, and does its own counting and sorting.
Gradients are those of tokens, scores and weights.

The columns are medians over rounds; TFLOP/s, counted as 6 * T * K * H * I for forward and three times that for forward
and backward; and the times of hp_moe and, on the CPU, of `products alone`, divided by the contender's (medians, and
best rounds). An implementation that uses these products cannot take less than `products over` of the contender's time.
`error` is the largest relative difference of output and gradients from a loop over experts in float32. On CUDA also the
memory saved for backward including the tokens, the same as a multiple of the minimum (tokens and the two
pre-activations), and the peak, which includes gradients.

transformers and Liger take part if they are installed. On the CPU `products alone` is the lower bound: the nine matrix
products of each expert, in memory that is allocated already. `kernels alone` adds the sort, and the gathers,
activations and sums of rows. With `--processor-time` and one thread (OMP_NUM_THREADS=1) other load on the machine has
less effect.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_moe import GroupedExperts, Routing


@dataclass
class Problem:
    """Inputs of all contenders, as leaves of autograd: w1, w3 `[E, I, H]`, w2 `[E, H, I]`, scores float32 `[T, K]`."""

    x: torch.Tensor
    experts: torch.Tensor
    scores: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def random(cls, tokens, dim, hidden_dim, num_experts, top_k, device, dtype):
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device)

        x, gate = normal(tokens, dim), normal(dim, num_experts) / dim**0.5
        scores, experts = torch.softmax(x @ gate, 1).topk(top_k, 1)
        shapes = ((hidden_dim, dim), (dim, hidden_dim), (hidden_dim, dim))
        weights = [(normal(num_experts, *shape) / shape[1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]
        x = x.to(dtype).requires_grad_()
        return cls(x, experts, scores.detach().requires_grad_(), *weights, normal(tokens, dim).to(dtype))

    def leaves(self):
        return [self.x, self.scores, self.w1, self.w2, self.w3]

    def flop(self):
        (_, hidden_dim, dim), (tokens, top_k) = self.w1.shape, self.scores.shape
        return 6 * tokens * top_k * dim * hidden_dim

    def least_saved(self):
        """Return the bytes of tokens and pre-activations, the least that backward needs."""
        rows, hidden_dim = self.scores.numel(), self.w1.shape[1]
        return self.x.element_size() * (self.x.numel() + 2 * rows * hidden_dim)


@dataclass
class Contender:
    """An implementation on a problem's data: `run(x, scores)`, and its weights as leaves."""

    run: object
    weights: list

    def forward(self, problem):
        return self.run(problem.x, problem.scores)

    def step(self, problem):
        """Return the output and the gradients of tokens, scores and weights."""
        y = self.forward(problem)
        return y, *torch.autograd.grad(y, [problem.x, problem.scores, *self.weights], problem.grad)


def hp(problem, fused=True):
    platform = get_platform("torch")
    with nn.building(platform):
        layer = GroupedExperts(problem.x.shape[1], problem.w1.shape[1], problem.w1.shape[0])
    for name in ("w1", "w2", "w3"):
        setattr(layer, name, torch.nn.Parameter(getattr(problem, name).detach()))

    def run(x, scores):
        # Usually the router counts. Counted here, because the other contenders count too.
        counts = platform.ops.bincount(problem.experts.reshape(-1), problem.w1.shape[0])
        routing = Routing(problem.experts, counts, scores)
        if fused:
            return layer(x, routing)
        sent = layer.dispatcher.dispatch(x, routing)
        return layer._one_step_at_a_time(sent, layer._local_weights())

    return Contender(run, [layer.w1, layer.w2, layer.w3])


def loop(problem):
    """A loop over experts."""

    def run(x, scores):
        out = torch.zeros_like(x)
        weights = zip(*(weight.unbind(0) for weight in (problem.w1, problem.w2, problem.w3)), strict=True)
        for expert, (w1, w2, w3) in enumerate(weights):
            token, slot = (problem.experts == expert).nonzero(as_tuple=True)
            rows = x[token]
            results = (F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
            out = out.index_add(0, token, (results * scores[token, slot, None]).to(x.dtype))
        return out

    return Contender(run, [problem.w1, problem.w2, problem.w3])


def grouped_mm(problem, compiled=False):
    """Three of torch's grouped products, with a sort before and a sum after them."""

    def run(x, scores):
        (tokens, top_k), num_experts = scores.shape, problem.w1.shape[0]
        flat = problem.experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        ends = counts.scatter_add(0, flat, torch.ones_like(flat)).cumsum(0, dtype=torch.int32)
        rows = x[order // top_k]
        gate, up = (F.grouped_mm(rows, w.transpose(1, 2), offs=ends) for w in (problem.w1, problem.w3))
        y = F.grouped_mm(F.silu(gate) * up, problem.w2.transpose(1, 2), offs=ends)
        weighted = (y * scores.reshape(-1)[order][:, None]).to(x.dtype)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        return weighted[inverse].view(tokens, top_k, -1).sum(1)

    return Contender(torch.compile(run) if compiled else run, [problem.w1, problem.w2, problem.w3])


def transformers(problem, implementation="grouped_mm"):
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    num_experts, hidden_dim, dim = problem.w1.shape
    config = Qwen3MoeConfig(hidden_size=dim, moe_intermediate_size=hidden_dim, num_experts=num_experts)
    config._experts_implementation = implementation
    with torch.device("meta"):
        layer = Qwen3MoeExperts(config)
    layer.gate_up_proj = torch.nn.Parameter(torch.cat([problem.w1, problem.w3], 1).detach())
    layer.down_proj = torch.nn.Parameter(problem.w2.detach())
    return Contender(lambda x, s: layer(x, problem.experts, s), [layer.gate_up_proj, layer.down_proj])


class ProductsAlone:
    """Only each expert's three products of forward and six of backward: no sort, activation or allocation."""

    weights = ()

    def __init__(self, problem):
        (num_experts, hidden_dim, _), top_k = problem.w1.shape, problem.scores.shape[1]
        self.counts = torch.bincount(problem.experts.reshape(-1), minlength=num_experts).tolist()
        self.inputs = problem.x.detach().repeat(top_k, 1)
        self.gate, self.up = (self.inputs.new_ones((len(self.inputs), hidden_dim)) for _ in range(2))
        self.results = torch.empty_like(self.inputs)
        self.matrices = [weight.detach() for weight in (problem.w1, problem.w2, problem.w3)]
        self.gradients = [torch.empty_like(weight) for weight in self.matrices]

    def forward(self, problem):
        for inputs, gate, up, results, (w1, w2, w3), _ in self.by_expert():
            torch.mm(inputs, w1.t(), out=gate)
            torch.mm(inputs, w3.t(), out=up)
            torch.mm(gate, w2.t(), out=results)

    def step(self, problem):
        self.forward(problem)
        for inputs, gate, up, results, (w1, w2, w3), (d_w1, d_w2, d_w3) in self.by_expert():
            torch.mm(inputs, w2, out=gate)
            torch.mm(inputs.t(), gate, out=d_w2)
            torch.mm(gate.t(), inputs, out=d_w1)
            torch.mm(up.t(), inputs, out=d_w3)
            torch.mm(gate, w1, out=results).addmm_(up, w3)

    def by_expert(self):
        """Yield the rows of inputs, gate, up and results, the weights and their gradients of each expert."""
        rows = [each.split(self.counts) for each in (self.inputs, self.gate, self.up, self.results)]
        pairs = (zip(*(each.unbind(0) for each in three), strict=True) for three in (self.matrices, self.gradients))
        return zip(*rows, *pairs, strict=True)


class KernelsAlone(ProductsAlone):
    """`ProductsAlone`, and the gathers, activations and sums of the rows, in batches that fit into the cache."""

    def __init__(self, problem):
        super().__init__(problem)
        (self.tokens, self.slots), (_, top_k) = self.sorted_rows(problem), problem.scores.shape
        self.firsts = torch.arange(0, len(self.tokens), top_k)
        self.score = problem.scores.detach().reshape(-1, 1)
        self.hidden, self.silu, self.product = (torch.ones_like(self.gate[: len(problem.x)]) for _ in range(3))
        self.gathered = torch.empty_like(problem.x)

    def sorted_rows(self, problem):
        """Return the token of each row in expert-major order, and the row of each slot."""
        order = torch.argsort(problem.experts.reshape(-1), stable=True)
        return order // problem.scores.shape[1], torch.argsort(order)

    def batches(self):
        size = len(self.gathered)
        return zip(*(each.split(size) for each in (self.tokens, self.gate, self.up, self.score)), strict=True)

    def sums(self):
        torch.ops.aten._embedding_bag_forward_only(self.results, self.slots, self.firsts)

    def forward(self, problem):
        super().forward(problem)
        self.sorted_rows(problem)
        for tokens, gate, up, _ in self.batches():
            torch.index_select(problem.x.detach(), 0, tokens, out=self.gathered)
            torch.ops.aten.silu.out(gate, out=self.hidden).mul_(up)
        self.sums()

    def step(self, problem):
        super().step(problem)
        for tokens, gate, up, score in self.batches():
            for source in (problem.grad, problem.x.detach()):
                torch.index_select(source, 0, tokens, out=self.gathered)
            torch.ops.aten.silu.out(gate, out=self.silu)
            torch.mul(self.silu, up, out=self.hidden)
            torch.mul(self.hidden, self.hidden, out=self.product).sum(1)
            for factor in (score, up, self.silu):
                self.hidden.mul_(factor)
            torch.ops.aten.silu_backward.grad_input(self.hidden, gate, grad_input=self.product)
        self.sums()


def liger(problem):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    gate_up = torch.cat([problem.w1, problem.w3], 1).detach().requires_grad_()
    experts = problem.experts.int()
    weights = [gate_up, problem.w2]
    return Contender(lambda x, s: LigerFusedMoEFunction.apply(x, *weights, experts, s), weights)


CONTENDERS = {
    "hp": hp,
    "hp, one step at a time": lambda problem: hp(problem, fused=False),
    "loop over experts": loop,
    "grouped_mm": grouped_mm,
    "grouped_mm, compiled": lambda problem: grouped_mm(problem, compiled=True),
    "transformers": transformers,
    "transformers, eager": lambda problem: transformers(problem, "eager"),
    "products alone": ProductsAlone,
    "kernels alone": KernelsAlone,
    "liger": liger,
}


def takes_part(name, device):
    module = {"transformers": "transformers", "liger": "liger_kernel"}.get(name.split(",")[0])
    # Not measured on the CPU; compiled grouped products support bfloat16 only.
    if name in ("hp, one step at a time", "grouped_mm, compiled", "liger") and device != "cuda":
        return False
    if name == "kernels alone" and device == "cuda":
        return False
    return module is None or importlib.util.find_spec(module) is not None


def seconds(function, device, clock=time.perf_counter):
    if device != "cuda":
        start = clock()
        function()
        return clock() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def memory(contender, problem):
    """Return (saved for backward with the tokens, peak) in bytes, without weights, scores, output and its gradient."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = contender.forward(problem)
    saved = torch.cuda.memory_allocated() - before - y.nbytes + problem.x.nbytes
    grads = torch.autograd.grad(y, [problem.x, problem.scores, *contender.weights], problem.grad)
    peak = torch.cuda.max_memory_allocated() - before + problem.x.nbytes
    del y, grads
    return saved, peak


def reference(problem):
    """Return the output and gradients of the loop over experts in float32, those of weights in the order w1, w2, w3."""
    wide = Problem(*(getattr(problem, name).detach() for name in ("x", "experts", "scores", "w1", "w2", "w3", "grad")))
    for name in ("x", "w1", "w2", "w3", "grad"):
        setattr(wide, name, getattr(wide, name).float())
    for leaf in wide.leaves():
        leaf.requires_grad_()
    return [result.detach() for result in loop(wide).step(wide)]


def error(contender, problem, expected):
    if isinstance(contender, ProductsAlone):
        return float("nan")
    results = [result.detach().float() for result in contender.step(problem)]
    if len(results) == len(expected) - 1:
        # Contenders with w1 and w3 in one tensor: split its gradient and restore the order.
        d_gate_up, d_w2 = results[3:]
        results[3:] = [*d_gate_up.split(problem.w1.shape[1], 1), d_w2]
        results[4], results[5] = results[5], results[4]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True))


def dense_rate(problem):
    """Return the TFLOP/s of a large dense matrix product, to notice a device whose clock changes."""
    size = 8192 if problem.x.is_cuda else 1024
    a, b = (torch.randn(size, size, device=problem.x.device).to(problem.x.dtype) for _ in range(2))
    device = problem.x.device.type
    times = [seconds(lambda: a @ b, device) for _ in range(23)][3:]
    return 2 * size**3 / statistics.median(times) / 1e12


def measure(contenders, problem, rounds, clock):
    """Return the seconds of (forward, forward and backward) of each contender, one number for each round."""
    device = problem.x.device.type
    # In turns, so that slow changes of the machine affect all contenders alike.
    times = {name: ([], []) for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            for at, function in enumerate((contender.forward, contender.step)):
                # A call that is not measured refills the allocator's cache with blocks of this contender's sizes.
                function(problem)
                times[name][at].append(seconds(lambda f=function: f(problem), device, clock))
    return times


def report(problem, names, rounds, clock):
    contenders = {name: CONTENDERS[name](problem) for name in names}
    expected = reference(problem)
    errors = {name: error(each, problem, expected) for name, each in contenders.items()}
    del expected
    print(f"dense product {dense_rate(problem):.3g} TFLOP/s, before")
    times = measure(contenders, problem, rounds, clock)
    print(f"dense product {dense_rate(problem):.3g} TFLOP/s, after")
    print(f"{'':24}{'forward':>9}{'TFLOP/s':>9}{'and back':>10}{'TFLOP/s':>9}", end="")
    print(f"{'hp over':>9}{'best':>7}{'products over':>15}{'best':>7}{'error':>9}", end="")
    print(f"{'saved MiB':>10}{'of least':>9}{'peak MiB':>10}" if problem.x.is_cuda else "")
    for name, rounds_of in times.items():
        forward, both = map(statistics.median, rounds_of)
        rates = problem.flop() / forward / 1e12, 3 * problem.flop() / both / 1e12
        ratios = []
        for other in ("hp", "products alone"):
            seconds_of = times[other][1] if other in times else [float("nan")]
            ratios += [statistics.median(seconds_of) / both, min(seconds_of) / min(rounds_of[1])]
        print(f"{name:24}{forward * 1e3:6.2f} ms{rates[0]:9.3g}{both * 1e3:7.2f} ms{rates[1]:9.3g}", end="")
        print("{:9.2f}{:7.2f}{:15.2f}{:7.2f}".format(*ratios), f"{errors[name]:8.1e}", end="")
        if problem.x.is_cuda:
            saved, peak = memory(contenders[name], problem)
            print(f"{saved / 2**20:10.0f}{saved / problem.least_saved():9.2f}{peak / 2**20:10.0f}", end="")
        print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, short, cpu, cuda in (
        ("tokens", "T", 1024, 16384),
        ("dim", "H", 256, 2048),
        ("hidden-dim", "I", 128, 768),
        ("experts", "E", 32, 128),
        ("top-k", "K", 4, 8),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{short}; {cpu} on the CPU, {cuda} on CUDA")
        parser.set_defaults(**{f"default_{name}": (cpu, cuda)})
    parser.add_argument("--dtype", help="float32 on the CPU, bfloat16 on CUDA")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time of this thread instead of wall time; CPU only",
    )
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    options = vars(parser.parse_args())
    on_cuda = options["device"] == "cuda"
    sizes = [
        options[name.replace("-", "_")] or options[f"default_{name}"][on_cuda]
        for name in ("tokens", "dim", "hidden-dim", "experts", "top-k")
    ]
    dtype = options["dtype"] or ("bfloat16" if on_cuda else "float32")
    names = options["only"] or [name for name in CONTENDERS if takes_part(name, options["device"])]
    device = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    print("T {} H {} I {} E {} K {}".format(*sizes), f"{dtype} on {device}, torch {torch.__version__}")
    problem = Problem.random(*sizes, options["device"], getattr(torch, dtype))
    report(problem, names, options["rounds"], time.thread_time if options["processor_time"] else time.perf_counter)


if __name__ == "__main__":
    main()
