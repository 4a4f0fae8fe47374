"""Evaluation of trained models: perplexity of a run's model, and the tasks of lm-eval on an exported one."""

from hp_trainer.evaluation.harness import run_harness
from hp_trainer.evaluation.perplexity import Perplexity, measure_perplexity, measure_perplexity_on

__all__ = ["Perplexity", "measure_perplexity", "measure_perplexity_on", "run_harness"]
