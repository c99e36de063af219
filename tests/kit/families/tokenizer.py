"""A byte-level tokenizer without merges: every text works, and nothing is downloaded."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 4096
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def byte_tokenizer(chat_template: str, *tokens: str, **named_tokens: str) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0 to 255), then the special ones: those of a chat's turns, `tokens`, `named_tokens`.

    Named are those that a family's processor asks the tokenizer for, such as `image_token`.
    """
    media_tokens = [*tokens, *named_tokens.values()]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level([PAD, TURN_START, TURN_END, *media_tokens]),
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, *media_tokens],
        chat_template=chat_template,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        **named_tokens,
    )


def _byte_level(special_tokens: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer
