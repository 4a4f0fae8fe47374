"""Data: from files to the global batches of a run.

A run reads samples at global positions 0, 1, 2, ... The tokens of a position are a pure function of the seed and the
position, independent of the number of ranks and of earlier reads. A resumed run therefore reads each sample once,
whatever its new layout. Mixtures and packed rows follow the same rule.

1. A reader (`formats`) yields the records of files, each with its location (`file:line`).
2. A `DocumentsSource` (`documents`; datasets `text` and `chat`) converts records to documents: tokens, and for each
   token whether it is predicted.
3. A corpus (`corpus`) stores the documents of a source in memory-mapped files, in a cache that runs share.
4. Samples (`samples`, `order`) split or pack corpora into rows of ids, targets and positions.
5. `BatchReader` (`dataset`) reads the rows of a global batch and returns this rank's share.

A new dataset subclasses `DatasetSource` (or `DocumentsSource` where only the conversion of records is new) and is
registered through the hook `hp_datasets`.
"""

from hp_trainer.data.chat import ChatDataConfig, ChatSource
from hp_trainer.data.corpus import Corpus, CorpusInfo, Document, build_corpus, cache_folder, read_corpus_info
from hp_trainer.data.dataset import (
    IGNORED,
    Batch,
    BatchReader,
    Dataset,
    DatasetSource,
    MixedOrder,
    Order,
    Rows,
    SampleOrder,
    Samples,
    Tokenizer,
)
from hp_trainer.data.documents import DocumentsConfig, DocumentsSource, TextDataConfig, TextSource
from hp_trainer.data.formats import find_text_files, open_reader, read_text_bytes, standard_library
from hp_trainer.data.samples import DocumentWindows, MixedSamples, PackedSamples, TokenSamples
from hp_trainer.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, train_tokenizer

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
