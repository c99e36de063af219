"""A byte-level tokenizer without merges: every text works, and nothing is downloaded."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    special_tokens: Sequence[str], *, eos: str, pad: str, chat_template: str, max_length: int
) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0 to 255), then the special tokens in the given order."""
    extra = [token for token in special_tokens if token not in (eos, pad)]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(special_tokens),
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=extra,
        chat_template=chat_template,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(special_tokens: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer
