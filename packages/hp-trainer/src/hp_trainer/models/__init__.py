"""Models: written once against a platform's operations, laid out over any mesh by their own `parallelize`."""

from hp_trainer.models.base import LanguageModel
from hp_trainer.models.moe_decoder import MoEDecoder, MoEDecoderConfig, build_moe_decoder

__all__ = ["LanguageModel", "MoEDecoder", "MoEDecoderConfig", "build_moe_decoder"]
