"""Text files to Megatron's indexed format, and tokenizers by name: ``python -m megatron_lossy.data --help``.

megatron-core itself is imported only when a data set is written, because importing it takes seconds.
"""

from .indexed import (  # noqa: F401
    check_blend,
    check_dataset,
    check_files,
    epochs,
    is_weight,
    read_description,
    stdlib_documents,
    validation_documents,
    write_indexed,
)
from .tokenizers import Tokenizer, build_tokenizer, padded_vocab_size  # noqa: F401
