"""The decoder: one module for the architectures that people train, configured by options."""

from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.decoder import Decoder, build_decoder

__all__ = ["Decoder", "DecoderConfig", "build_decoder"]
