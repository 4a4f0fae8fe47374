"""Text as samples that are addressed by a global index, the same for any number of ranks."""

from hp_trainer.data.corpus import Corpus, CorpusInfo, build_corpus, read_corpus_info
from hp_trainer.data.dataset import (
    IGNORED,
    Batch,
    BatchReader,
    Dataset,
    DatasetSource,
    Rows,
    Samples,
    Tokenizer,
)
from hp_trainer.data.order import SampleOrder
from hp_trainer.data.text import TextDataConfig, TextSource, TokenSamples
from hp_trainer.data.text_files import find_text_files, holds_text, read_text_bytes, standard_library
from hp_trainer.data.tokenizer import ByteTokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchReader",
    "ByteTokenizer",
    "Corpus",
    "CorpusInfo",
    "Dataset",
    "DatasetSource",
    "Rows",
    "SampleOrder",
    "Samples",
    "TextDataConfig",
    "TextSource",
    "TokenSamples",
    "Tokenizer",
    "build_corpus",
    "find_text_files",
    "holds_text",
    "read_corpus_info",
    "read_text_bytes",
    "standard_library",
]
