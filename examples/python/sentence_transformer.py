"""Where a program calls `sentence_transformers.SentenceTransformer(model)`: the same calls, over a bundle."""

import qhx


class SentenceTransformer:
    def __init__(self, model, **options):
        self.model = qhx.Model(model, **options)

    def encode(self, sentences, *, prompt_name="document"):
        several = [sentences] if isinstance(sentences, str) else sentences
        vectors = self.model.embed(several, role=prompt_name, truncate=True)
        return vectors[0] if isinstance(sentences, str) else vectors

    def similarity(self, one, other):
        return one @ other.T
