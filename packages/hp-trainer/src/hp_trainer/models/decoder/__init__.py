"""The decoder: one module for the architectures that people train, put together from options."""

from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.decoder import Decoder, DecoderParts, build_decoder

__all__ = ["Decoder", "DecoderConfig", "DecoderParts", "build_decoder"]
