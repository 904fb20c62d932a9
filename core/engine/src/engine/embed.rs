//! Texts and images to vectors, one or many, and pairs of texts to scores.

use std::sync::Arc;

use super::checked::Checked;
use super::model::Model;
use crate::op::{HostOp as _, Segment, Task};
use qhx_base::{CancelToken, ErrorKind, Result, error, trace};
use qhx_types::Media;

/// The vector of a text, and what a host-op gives for its tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct TextAndTokens {
    /// The vector of the text.
    pub vector: Vec<f32>,
    /// A weight for each token, special ones included, where there are such.
    pub weights: Option<Vec<f32>>,
    /// A vector for each token but the first ones that have none, where there are such.
    pub rows: Option<Vec<Vec<f32>>>,
}

impl Model {
    /// Embeds one text.
    ///
    /// # Errors
    /// When the vector is zero or not finite: nothing can be compared with it.
    pub fn embed(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.require_vectors()?;
        self.embed_segments(&[Segment::Tokens(tokens)], ("tokens", tokens.len()))
    }

    /// Embeds one text, with what the host-op gives for each of its tokens.
    ///
    /// # Errors
    /// Errors of [`Model::embed`], and when the host-op, or this bundle of it, gives nothing for tokens.
    pub fn embed_tokens(&mut self, tokens: &[u32]) -> Result<TextAndTokens> {
        self.require_vectors()?;
        let info = self.info();
        let (dim, of) = (info.embedding_dim, info.of_tokens);
        if of.is_none() {
            let path = self.manifest().path.display();
            return Err(error!(Usage, "{path}: a bundle without weights or vectors of tokens")
                .hint("make one of a model with such heads, as BAAI/bge-m3 has them"));
        }
        let bundle = Arc::clone(&self.bundle);
        let _span = trace::span_with(bundle.trace(), "embed", |span| {
            span.argument("tokens", tokens.len());
        });
        let segments = [Segment::Tokens(tokens)];
        let values = self.embed_by(|op| op.embed_tokens(&segments))?;
        let (vector, rest) = values.split_at(dim.min(values.len()));
        let count = if of.weights { tokens.len() } else { 0 };
        let (weights, rows) = rest.split_at(count.min(rest.len()));
        let rows = match of.dim {
            0 => None,
            dim => Some(rows.chunks_exact(dim).map(<[f32]>::to_vec).collect()),
        };
        let weights = of.weights.then(|| weights.to_vec());
        Ok(TextAndTokens { vector: vector.to_vec(), weights, rows })
    }

    /// Embeds an image, or another medium that the host-op gives a vector of its own.
    ///
    /// # Errors
    /// Errors of [`Model::embed`], and when the host-op does not take the medium.
    pub fn embed_media(&mut self, media: &Media) -> Result<&[f32]> {
        self.require_vectors()?;
        self.embed_segments(&[media.segment()], ("media", 1))
    }

    /// Errors when the host-op, or this bundle of it, gives no vectors.
    pub(super) fn require_vectors(&self) -> Result<()> {
        self.require(Task::Embed, "embed")?;
        if self.info().scores == 0 {
            return Ok(());
        }
        let path = self.manifest().path.display();
        Err(error!(Usage, "{path}: a bundle of the task score gives no vectors of texts")
            .hint("rank documents with `qhx rerank`, or make a bundle of an encoder, `qhx forge --task embed`"))
    }

    /// The score of a text that holds query and document, or of a pair of texts as its tokenizer lays them out: the
    /// parts are the tokens of the one, then of the other. It is the output of the model's head, a logit.
    ///
    /// # Errors
    /// When the bundle does not score, the parts do not fit the encoder, the score is not finite, or `cancel` stops it.
    pub fn score_parts(&mut self, parts: &[&[u32]], cancel: &CancelToken) -> Result<f32> {
        self.require_scores()?;
        let segments: Vec<_> = parts.iter().map(|part| Segment::Tokens(part)).collect();
        let count = parts.iter().map(|part| part.len()).sum();
        self.cancellable(cancel, |model| {
            let scores = model.embed_segments(&segments, ("tokens", count))?;
            Ok(scores.first().copied().unwrap_or_default())
        })
    }

    /// Errors when the host-op, or this bundle of it, does not score with one value.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] when it does not.
    pub fn require_scores(&self) -> Result<()> {
        self.require(Task::Score, "score")?;
        match self.info().scores {
            1 => Ok(()),
            found => {
                let path = self.manifest().path.display();
                Err(error!(Usage, "{path}: {found} scores for a pair of texts, expected 1")
                    .hint("make a bundle of a reranker with `qhx forge --task score`"))
            }
        }
    }

    /// Embeds texts, given as their tokens: a vector for each, in their order.
    ///
    /// Short texts share a graph where the host-op's graphs allow it, each as if it were alone. Its vector is then that
    /// of [`Model::embed`] but for rounding, which depends on the place of the text in the graph.
    ///
    /// # Errors
    /// Errors of [`Model::embed`]; the error names the text by its index.
    pub fn embed_many<T: AsRef<[u32]>>(&mut self, texts: &[T]) -> Result<Vec<Vec<f32>>> {
        let mut vectors = Vec::with_capacity(texts.len());
        let embedded = self.embed_each(texts, |_, vector| {
            vectors.push(vector.to_vec());
            Ok(())
        });
        match embedded {
            Ok(()) => Ok(vectors),
            Err(e) => Err(e.context(format_args!("text {}", vectors.len()))),
        }
    }

    /// Same as [`Model::embed_many`], with each vector given to `done` as soon as it and all before it are there. At
    /// most the vectors of one window of [`Model::batch_tokens`] tokens are held.
    ///
    /// When a text fails, `done` has been called for those before it and for no other. An error of `done` also ends the
    /// work.
    ///
    /// # Errors
    /// Errors of [`Model::embed_many`], and any error of `done`.
    pub fn embed_each<T: AsRef<[u32]>>(
        &mut self,
        texts: &[T],
        mut done: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut first = 0;
        while let Some(rest) = texts.get(first..).filter(|rest| !rest.is_empty()) {
            let count = self.embeddings.packer.window(rest.iter().map(|text| text.as_ref().len()));
            match &rest[..count] {
                [text] => done(first, self.embed(text.as_ref())?)?,
                window => {
                    self.embed_window(window, |index, vector| done(first + index, vector))?;
                }
            }
            first += count;
        }
        Ok(())
    }

    /// Tokens of texts that are worth collecting for one call of [`Model::embed_each`]; 0 where each text needs an
    /// execution of its own.
    pub fn batch_tokens(&self) -> usize {
        self.embeddings.packer.window_tokens()
    }

    /// Embeds the texts of a window in the cheapest packs.
    fn embed_window<T: AsRef<[u32]>>(
        &mut self,
        texts: &[T],
        mut done: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let lengths: Vec<usize> = texts.iter().map(|text| text.as_ref().len()).collect();
        let mut vectors: Vec<Option<Vec<f32>>> = vec![None; texts.len()];
        // The first text that failed. Those before it are embedded all the same.
        let mut failed = None;
        for pack in self.embeddings.packer.plan(&lengths) {
            if failed.as_ref().is_some_and(|(text, _)| pack.iter().all(|other| other > text)) {
                continue;
            }
            if let Err((text, error)) = self.embed_together(texts, &pack, &mut vectors) {
                let cancelled = error.kind() == ErrorKind::Cancelled;
                if failed.as_ref().is_none_or(|(first, _)| text < *first) || cancelled {
                    failed = Some((text, error));
                }
                if cancelled {
                    break;
                }
            }
        }
        for (index, vector) in vectors.iter().map_while(Option::as_ref).enumerate() {
            done(index, vector)?;
        }
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Embeds the texts of one pack, or returns which of them failed. When a pack fails as a whole, each text is tried
    /// by itself: that one is named that fails alone, with the error it has alone.
    fn embed_together<T: AsRef<[u32]>>(
        &mut self,
        texts: &[T],
        pack: &[usize],
        vectors: &mut [Option<Vec<f32>>],
    ) -> std::result::Result<(), (usize, qhx_base::Error)> {
        let tokens: Vec<&[u32]> = pack.iter().map(|&text| texts[text].as_ref()).collect();
        if let [first, _, ..] = pack {
            let width = self.info().values();
            match self.embed_pack(&tokens) {
                Ok(rows) => {
                    for (&text, row) in pack.iter().zip(rows.chunks_exact(width.max(1))) {
                        vectors[text] = Some(row.to_vec());
                    }
                    return Ok(());
                }
                Err(e) if e.kind() == ErrorKind::Cancelled => return Err((*first, e)),
                Err(e) => tracing::debug!("{} texts in one graph, now one by one: {e}", pack.len()),
            }
        }
        let mut alone: Vec<usize> = pack.to_vec();
        alone.sort_unstable();
        for text in alone {
            let vector = self.embed(texts[text].as_ref()).map_err(|e| (text, e))?;
            vectors[text] = Some(vector.to_vec());
        }
        Ok(())
    }

    /// Embeds one text. A trace has its size under this name.
    pub(super) fn embed_segments(
        &mut self,
        segments: &[Segment<'_>],
        (unit, size): (&'static str, usize),
    ) -> Result<&[f32]> {
        let bundle = Arc::clone(&self.bundle);
        let _span = trace::span_with(bundle.trace(), "embed", |span| span.argument(unit, size));
        self.embed_by(|op| op.embed(segments))
    }

    /// Embeds texts in one execution. Their vectors lie one behind the other.
    fn embed_pack(&mut self, texts: &[&[u32]]) -> Result<&[f32]> {
        let bundle = Arc::clone(&self.bundle);
        let _span = trace::span_with(bundle.trace(), "embed", |span| {
            span.argument("tokens", texts.iter().map(|text| text.len()).sum::<usize>());
            span.argument("texts", texts.len());
        });
        self.embed_by(|op| op.embed_many(texts))
    }

    /// Embeds, and keeps what the op only lends.
    fn embed_by(
        &mut self,
        mut embed: impl for<'a> FnMut(&'a mut Checked) -> Result<&'a [f32]>,
    ) -> Result<&[f32]> {
        self.twice(|model| {
            let embedded = embed(&mut model.op)?;
            let last = &mut model.embeddings.last;
            last.clear();
            last.extend_from_slice(embedded);
            Ok(())
        })?;
        Ok(&self.embeddings.last)
    }
}
