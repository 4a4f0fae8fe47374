"""Models: written once against a platform's operations, laid out over any mesh by their own `parallelize`."""

from hp_trainer.models.base import LanguageModel
from hp_trainer.models.decoder import Decoder, DecoderConfig, DecoderParts, build_decoder

__all__ = ["Decoder", "DecoderConfig", "DecoderParts", "LanguageModel", "build_decoder"]
