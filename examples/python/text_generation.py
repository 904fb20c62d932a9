"""Where a program calls `transformers.pipeline("text-generation", model)`: the same calls, over a bundle."""

import qhx


class TextGenerationPipeline:
    def __init__(self, model, **options):
        self.model = qhx.Model(model, **options)

    def __call__(self, inputs, *, max_new_tokens=256, do_sample=False, temperature=1.0, top_p=None, **options):
        options.update(max_new_tokens=max_new_tokens, temperature=temperature if do_sample else 0, top_p=top_p)
        if isinstance(inputs, str):
            return [{"generated_text": inputs + self.model.generate(inputs, **options).text}]
        answer = {"role": "assistant", "content": self.model.chat(inputs, **options).text}
        return [{"generated_text": [*inputs, answer]}]
