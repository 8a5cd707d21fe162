"""Text files to Megatron's indexed format, and tokenizers by name: ``python -m megatron_lossy.data --help``.

megatron-core itself is imported only when a data set is written, because importing it takes seconds.
"""

from .documents import stdlib_documents, validation_documents  # noqa: F401
from .indexed import check_blend, check_dataset, check_files, epochs, is_weight, read_description, write_indexed  # noqa: F401
from .tokenizers import Tokenizer, build_tokenizer, padded_vocab_size  # noqa: F401
