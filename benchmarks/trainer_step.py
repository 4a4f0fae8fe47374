"""Training steps of a small Llama on one rank: hp-train's, and those of `transformers.Trainer` on the same model.

    python benchmarks/trainer_step.py [--hidden 256] [--layers 4] [--length 256] [--batch 8] [--rounds 15]

Both start from the same weights, read the same batches, and update by fused AdamW after clipping. They take turns in
one process on one thread. Of each, the median processor time of a step and its tokens per second are printed. The limit
is the model's products alone, forward and backward: a step cannot be faster. The losses of all steps are compared, and
must be equal within 1e-3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from hp_dtensor import get_platform
from hp_trainer._coordination import StopRequest
from hp_trainer.config import parse_config
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.training import Trainer

WARM_UP = 3
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.0, 1.0


def llama(options: argparse.Namespace) -> transformers.LlamaForCausalLM:
    """Return the model with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=options.length,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def hp_trainer(folder: Path, steps: int, options: argparse.Namespace) -> Trainer:
    """Return hp-train's training loop with the weights of the directory `folder/model`."""
    settings = {
        "training.steps": steps,
        "training.sequence_length": options.length,
        "training.global_batch_size": options.batch,
        "training.eval_interval": "null",
        "training.clip_norm": CLIP,
        "optimizer.lr": LR,
        "optimizer.betas": list(BETAS),
        "optimizer.eps": EPS,
        "optimizer.weight_decay": DECAY,
        "lr_schedule.kind": "constant",
        "lr_schedule.warmup_steps": 0,
        "checkpoint.interval": "null",
        "metrics.trackers": "[]",
        "generate.prompts": "[]",
    }
    given = [(name, str(value)) for name, value in settings.items()]
    model = f"model: {{name: decoder, from: {folder}/model}}\n"
    config = parse_config(model, given, registered=registries()).config
    return Trainer(create_run(folder / "run", config), config, get_platform("torch"))


class InTurns(transformers.TrainerCallback):
    """Does a step of hp-train after each of transformers' Trainer, and measures both."""

    def __init__(self, ours: Trainer) -> None:
        self.ours = ours
        self.their_seconds: list[float] = []
        self.our_seconds: list[float] = []
        self.our_losses: list[float] = []
        self._resumed = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._resumed = time.process_time()

    # Not at the end of a step, after which the Trainer still reads and logs the loss.
    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        if "loss" not in logs:
            return
        stopped = time.process_time()
        self.their_seconds.append(stopped - self._resumed)
        self.ours.train_step(StopRequest())
        self._resumed = time.process_time()
        self.our_seconds.append(self._resumed - stopped)
        self.our_losses.append(self.ours._last.loss)


def samples(ours: Trainer, steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the samples that hp-train reads in its steps, in order."""
    size = ours.config.training.global_batch_size
    batches = [ours._train_batches.read(step * size) for step in range(steps)]
    rows = ((ids, targets) for batch in batches for ids, targets in zip(batch.ids, batch.targets, strict=True))
    # The model would shift `labels`, and lose the last target; `shift_labels` are used as they are.
    columns = [(torch.from_numpy(ids.copy()), torch.from_numpy(targets.copy())) for ids, targets in rows]
    return [{"input_ids": ids, "labels": targets, "shift_labels": targets} for ids, targets in columns]


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def their_trainer(
    folder: Path, ours: Trainer, callback: InTurns, steps: int, options: argparse.Namespace
) -> transformers.Trainer:
    """Return the Trainer with the settings of `ours`; it logs each loss and writes nothing."""
    args = transformers.TrainingArguments(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=options.batch,
        max_steps=steps,
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        report_to=[],
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    trainer = InOrder(model=model, args=args, train_dataset=samples(ours, steps), callbacks=[callback])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def products(model: transformers.LlamaForCausalLM, options: argparse.Namespace):
    """Return a function that computes the products of a step: of each layer's weights, and attention."""
    tokens, heads = options.batch * options.length, options.hidden // 32
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    operands = [(torch.randn(tokens, w.shape[1]), torch.randn(tokens, w.shape[0]), w) for w in weights]
    q, k, v, grad = (torch.randn(options.batch, heads, options.length, 32) for _ in range(4))
    qkv = [each.requires_grad_() for each in (q, k, v)]

    def compute():
        for x, dy, w in operands:
            x @ w.T, dy @ w, dy.T @ x
        for _ in range(options.layers):
            torch.autograd.grad(scaled_dot_product_attention(*qkv, is_causal=True), qkv, grad)

    return compute


def seconds(function, rounds: int) -> float:
    """Return the median processor seconds of a call."""
    times = []
    for _ in range(WARM_UP + rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    steps, tokens = WARM_UP + options.rounds, options.batch * options.length
    with tempfile.TemporaryDirectory() as folder:
        model = llama(options)
        model.save_pretrained(Path(folder) / "model")
        ours = hp_trainer(Path(folder), steps, options)
        turns = InTurns(ours)
        theirs = their_trainer(Path(folder), ours, turns, steps, options)
        theirs.train()
        losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    limit = seconds(products(model, options), options.rounds)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {options.batch} samples of {options.length} tokens")
    measured = {"products alone": limit}
    measured |= {
        name: statistics.median(each[WARM_UP:])
        for name, each in (("transformers", turns.their_seconds), ("hp-train", turns.our_seconds))
    }
    for name, time_of_step in measured.items():
        print(
            f"{name:16}{time_of_step * 1e3:9.1f} ms{tokens / time_of_step:10,.0f} tokens/s"
            f"{measured['transformers'] / time_of_step:7.2f} of transformers'{limit / time_of_step:7.2f} of the limit"
        )
    difference = max(abs(a - b) for a, b in zip(losses, turns.our_losses, strict=True))
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, largest difference {difference:.1e}")
    if difference > 1e-3:
        sys.exit("the losses differ, so these are not the same steps")


if __name__ == "__main__":
    main()
