"""Models, written once with a platform's operations and parallelized over any mesh by their own `parallelize`."""

from hp_trainer.models.base import LanguageModel, ModelPart
from hp_trainer.models.decoder import Decoder, DecoderConfig, build_decoder
from hp_trainer.models.estimates import ModelEstimates

__all__ = ["Decoder", "DecoderConfig", "LanguageModel", "ModelEstimates", "ModelPart", "build_decoder"]
