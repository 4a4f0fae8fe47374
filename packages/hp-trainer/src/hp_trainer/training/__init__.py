"""The training loop of one rank. Start reading at `Trainer.train_step`; a new setting goes to `config/schema.py`.

A step of `trainer` and `step`:

1. Batch. `BatchReader.read(position)` returns this rank's samples of the global batch. Nothing but the choice of the
   samples depends on the number of ranks.
2. Gradients. Forward and backward of each micro-batch. Losses are summed over targets and divided once by the targets
   of the global batch, so that gradients are those of the global mean. They are reduced in the last backward only.
3. Agreement. One all-reduce over the world has the loss and whether a rank was asked to stop. All ranks see the same
   numbers, so that a NaN or a signal stops all of them at the same step. `LossGuard` may discard the step.
4. Update. Unscale, clip, optimizer step, the model's `after_optimizer_step`, and moves of busy experts.
5. Records. Trackers (rank 0) and life-cycle hooks (every rank) get a frozen `StepRecord`.
"""

from hp_trainer.training.optimizer import Optimizer
from hp_trainer.training.setup import RankSetup, open_dataset
from hp_trainer.training.state import load_state
from hp_trainer.training.trainer import Trainer

__all__ = ["Optimizer", "RankSetup", "Trainer", "load_state", "open_dataset"]
