"""Text from a trained character model, one character after the other."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, datasets

_CHARACTERS = slice(2, None)  # Neither padding nor the unknown character.


def sample_text(
    model: tf.keras.Model,
    prompt: str,
    length: int = 400,
    *,
    temperature: float = 0.5,
    context: int = 20,
    seed: int | None = None,
) -> str:
    """Returns a prompt and the characters that a model goes on with.

    Sampling looks at the model alone, so it costs no privacy.

    Args:
      model: Takes int32[batch, characters], gives logits float[batch,
        characters, vocabulary], as `models.lstm` does.
      prompt: What to begin with, at least one character.
      length: How many characters to add.
      temperature: What logits are divided by; 0 takes the likeliest always.
      context: How many of the last characters the model sees; those of an
        example that it was trained with.
      seed: For the same text again.

    Raises:
      ValueError: An argument is out of its range, or the model has another
        vocabulary.
    """
    if not prompt:
        raise ValueError("prompt must have a character, got ''.")
    _validate.non_negative_integer(length=length)
    _validate.positive_integer(context=context)
    temperature = _validate.non_negative(temperature=temperature)
    vocabulary = len(datasets.shakespeare_vocabulary())
    if model.output_shape[-1] != vocabulary:
        raise ValueError(
            f"model must give {vocabulary} logits for a character, got "
            f"{model.output_shape}."
        )
    # Traced once: with fewer characters than `context`, the model sees those.
    predict = tf.function(
        lambda ids: model(ids, training=False)[0, -1],
        input_signature=[tf.TensorSpec([1, None], tf.int32)],
    )
    generator = np.random.default_rng(seed)
    ids = datasets.encode_text(prompt).tolist()
    for _ in range(length):
        logits = predict(tf.constant([ids[-context:]])).numpy()[_CHARACTERS]
        ids.append(_CHARACTERS.start + _draw(logits, temperature, generator))
    return datasets.decode_text(ids)


def _draw(
    logits: np.ndarray, temperature: float, generator: np.random.Generator
) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    # The largest of logits with Gumbel noise is a draw from their softmax.
    return int(np.argmax(logits / temperature + generator.gumbel(size=logits.shape)))
