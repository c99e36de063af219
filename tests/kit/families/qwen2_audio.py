"""A tiny Qwen2-Audio. A sound, padded to 30 seconds as Whisper does, becomes 25 rows a second."""

from pathlib import Path

from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from tests.kit.families.checkpoint import rename_weights, text_config, write_checkpoint
from tests.kit.families.template import chatml
from tests.kit.families.tokenizer import byte_tokenizer

NUM_MEL_BINS = 16
START, AUDIO, END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = byte_tokenizer(chatml(audio=f"{START}{AUDIO}{END}"), START, AUDIO, END)
    config = Qwen2AudioConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        audio_config={
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "num_mel_bins": NUM_MEL_BINS,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO),
        tie_word_embeddings=False,
    )
    write_checkpoint(
        out,
        tokenizer,
        Qwen2AudioForConditionalGeneration(config),
        "Qwen2AudioProcessor",
        preprocessor={"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": NUM_MEL_BINS},
    )
    rename_weights(out, "language_model.model.model.", "language_model.model.")
