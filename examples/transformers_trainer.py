"""A `transformers.Trainer` of a sharded model: torchrun --nproc-per-node=2 examples/transformers_trainer.py FOLDER

Trains a small Llama of random weights, and writes it as one full model that `from_pretrained` loads.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard


class ShardedTrainer(transformers.Trainer):
    """A Trainer of a model that has been through `hp_fsdp.fully_shard`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The model reduces its gradients itself: accelerate must not wrap it in `DistributedDataParallel`.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the full model from rank 0. Every rank gathers; the Trainer's own method runs on rank 0 alone."""
        self.model.save_pretrained(output_dir or self.args.output_dir)


def build() -> transformers.LlamaForCausalLM:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    """Return four sequences of eight tokens."""
    rows = (torch.arange(8) * step % 32 for step in (1, 3, 5, 7))
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: Path) -> None:
    """Train for three steps on all samples, with a checkpoint of the model after each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), platform="torch")
    model = build()
    for layer in model.model.layers:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    trainer = ShardedTrainer(
        model=model,
        train_dataset=samples(),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4 // mesh.size(),
            max_steps=3,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            save_steps=1,
            save_only_model=True,  # to resume, save the optimizer by `torch.distributed.checkpoint`
            use_cpu=device == "cpu",
            report_to=[],
        ),
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
