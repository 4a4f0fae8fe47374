"""Documents as samples that are addressed by a global index, the same for any number of ranks."""

from hp_trainer.data.cache import cache_folder
from hp_trainer.data.chat import ChatDataConfig, ChatSource
from hp_trainer.data.corpus import Corpus, CorpusInfo, Document, build_corpus, read_corpus_info
from hp_trainer.data.dataset import (
    IGNORED,
    Batch,
    BatchReader,
    Dataset,
    DatasetSource,
    Order,
    Rows,
    Samples,
    Tokenizer,
)
from hp_trainer.data.documents import DocumentsConfig, DocumentsSource
from hp_trainer.data.formats import find_text_files, open_reader, read_text_bytes, standard_library
from hp_trainer.data.mixture import MixedOrder, MixedSamples
from hp_trainer.data.order import SampleOrder
from hp_trainer.data.samples import DocumentWindows, PackedSamples, TokenSamples
from hp_trainer.data.text import TextDataConfig, TextSource
from hp_trainer.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from hp_trainer.data.train_tokenizer import train_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchReader",
    "ByteTokenizer",
    "ChatDataConfig",
    "ChatSource",
    "Corpus",
    "CorpusInfo",
    "Dataset",
    "DatasetSource",
    "Document",
    "DocumentWindows",
    "DocumentsConfig",
    "DocumentsSource",
    "FileTokenizer",
    "MixedOrder",
    "MixedSamples",
    "Order",
    "PackedSamples",
    "Rows",
    "SampleOrder",
    "Samples",
    "TextDataConfig",
    "TextSource",
    "TokenSamples",
    "Tokenizer",
    "build_corpus",
    "cache_folder",
    "find_text_files",
    "load_tokenizer",
    "open_reader",
    "read_corpus_info",
    "read_text_bytes",
    "standard_library",
    "train_tokenizer",
]
